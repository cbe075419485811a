"""What a function or an object does, as a few hexadecimal digits: two versions of a loss are told apart.

The same text gives the same digits in every process of one version of Python. What installed packages bring
is known by its name, since a run notes the versions of those that it computes with; all else is known by its
bytecode, its constants, its defaults, what it closes over, and the functions and values that it calls by
name. No text shows everything (an object in the user's file, an import inside a function): a trial of the
model, the loss and the metric (`partita.engine.model.probe.tried`) tells the rest.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DIGITS = 12
DEPTH = 60  # how far the walk goes: what is deeper is known by the name of its kind
PLAIN = (bool, int, float, complex, str, bytes)
CONTAINERS = (list, tuple, set, frozenset, Mapping)
OURS = {"partita", "torch", "numpy", *sys.stdlib_module_names} - {"__main__"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_MODULE = set(vars(nn.Module())) - {"training"}  # what every module has: its tensors, its parts, hooks


def digest(value: Any) -> str:
    """The digits of a value, whatever it is."""
    found = _Digest()
    found.add(value)
    return found.hexdigest()


def structure_digest(model: nn.Module) -> str:
    """The digits of a model without its weights: its layers, with which settings, computed by which code."""
    found = _Digest()
    found.module(model)
    return found.hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """The digits of named tensors, every bit of them; each is read once."""
    found = _Digest()
    for name, tensor in tensors.items():
        found.word(name)
        found.tensor(tensor)
    return found.hexdigest()


def told_by_name(value: Any) -> bool:
    """Whether its name and the version of its library say all: a plain function or class of a library."""
    if isinstance(value, FunctionType):
        return is_known(value) and value.__closure__ is None
    return isinstance(value, BuiltinFunctionType | type) and is_known(value)


def is_known(value: Any) -> bool:
    """Whether a function, a class or a module is of an installed package."""
    if isinstance(value, FunctionType):  # it may bear the name of another that it wraps
        module = value.__globals__.get("__name__")
    else:
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return _installed(str(module or "").partition(".")[0])


def _installed(package: str) -> bool:
    if package in OURS:
        return True
    module = sys.modules.get(package)
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(place).parts)


class _Digest:
    """A walk through what decides what a value does; functions, classes and objects are walked once."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.met: dict[int, tuple[int, Any]] = {}  # with the object: its number must not go to another
        self.inside: set[int] = set()  # of which containers the walk is in
        self.depth = 0

    def hexdigest(self) -> str:
        """What was walked so far, in digits."""
        return self.hash.hexdigest()[:DIGITS]

    def word(self, text: str) -> None:
        """Text, with its length: 'ab', 'c' is not 'a', 'bc'."""
        part = text.encode(errors="surrogatepass")
        self.hash.update(f"{len(part)}:".encode() + part)

    def add(self, value: Any) -> None:
        """Any value; what cannot be looked into is known by the name of its kind."""
        if self.depth >= DEPTH:
            self.word(type(value).__qualname__)
            return
        self.depth += 1
        try:
            self._add(value)
        except Exception:  # an object may answer any question with an error of its own
            self.word(type(value).__qualname__)
        finally:
            self.depth -= 1

    def _add(self, value: Any) -> None:
        if value is None or isinstance(value, PLAIN):
            self.word(f"{type(value).__name__} {value!r}")
        elif isinstance(value, CodeType):
            self.code(value)
        elif not isinstance(value, type) and isinstance(value, CONTAINERS):
            # equal ones may be one object here and two in another process
            if id(value) in self.inside:
                self.word("itself")
                return
            self.inside.add(id(value))
            self.container(value)
            self.inside.remove(id(value))
        elif id(value) in self.met:
            self.word(f"again {self.met[id(value)][0]}")
        else:
            self.met[id(value)] = len(self.met), value
            self.thing(value)

    def container(self, value: Any) -> None:
        """What it holds."""
        self.word(f"{type(value).__name__} {len(value)}")
        if isinstance(value, set | frozenset):
            self.word(str(sorted(map(digest, value))))
        elif isinstance(value, Mapping):
            for key in value:
                self.add(key)
                self.add(value[key])
        else:
            for each in value:
                self.add(each)

    def thing(self, value: Any) -> None:
        """By what kind of thing it is."""
        if isinstance(value, Tensor):
            self.tensor(value)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self.word(f"{value.dtype} {value.shape}")
            self.hash.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, functools.partial):
            self.word("partial")
            self.add((value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            self.word("method")
            self.add((value.__func__, value.__self__))
        elif isinstance(value, FunctionType):
            self.function(value)
        elif isinstance(value, type):
            self.kind(value)
        elif isinstance(value, ModuleType):
            self.word(value.__name__)
        elif isinstance(value, nn.Module):
            self.module(value)
            for name, tensor in value.state_dict(keep_vars=True).items():
                self.word(name)
                self.add(tensor)
        else:
            self.instance(value)

    def tensor(self, value: Tensor) -> None:
        """Its kind, its shape and all its bits."""
        value = value.detach()
        self.word(f"{value.dtype} {tuple(value.shape)}")
        if value.layout is torch.strided and not value.is_meta:
            flat = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            self.hash.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")

    def function(self, value: FunctionType) -> None:
        """A library's by its name, another by what it does; both by what they close over."""
        known = is_known(value)
        self.word(f"function {value.__qualname__ if known else ''}")
        for cell in value.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                self.word("empty")
                continue
            if not known or _is_ones_own(held) or _is_plain(held):
                self.add(held)
        if known:
            self.word(str(value.__globals__.get("__name__")))
            return
        self.code(value.__code__)
        self.add((value.__defaults__, value.__kwdefaults__))
        own = {k: v for k, v in vars(value).items() if k != "__wrapped__"}
        self.add(own)
        names = sorted(set(_names(value.__code__)))
        for name in names:
            if name in value.__globals__:
                self.named(name, value.__globals__[name], names)

    def named(self, name: str, value: Any, names: list[str]) -> None:
        """Of what a function finds by a name in its file: functions, classes and values that stay.

        A list or an object there may be what the function counts in. Of a module of the user's it is what the
        function calls by name.
        """
        self.word(name)
        if isinstance(value, ModuleType):
            self.word(value.__name__)
            for part in [] if is_known(value) or id(value) in self.inside else names:
                if part in vars(value):
                    self.inside.add(id(value))
                    self.named(part, vars(value)[part], names)
                    self.inside.discard(id(value))
        elif callable(value) or (_is_plain(value) and not isinstance(value, list | dict | set)):
            self.add(value)
        else:
            self.word(type(value).__qualname__)

    def code(self, code: CodeType) -> None:
        """Instructions and their constants; not its lines, its file or its docstring."""
        self.word(
            f"{code.co_argcount} {code.co_kwonlyargcount} {code.co_posonlyargcount} {len(code.co_code)}"
        )
        self.hash.update(code.co_exceptiontable)
        for step in dis.get_instructions(code):
            self.word(step.opname)
            if step.opcode in dis.hasconst:
                self.add(step.argval)
            else:
                self.word(str(step.argval))

    def kind(self, value: type) -> None:
        """A class by its functions and values, and those of what it inherits from."""
        self.word(f"class {value.__qualname__}")
        if is_known(value):
            self.word(value.__module__)
            return
        for name, part in sorted(vars(value).items()):
            if name not in _CLASS:
                self.word(name)
                self.add(_unwrapped(part))
        for base in value.__bases__:
            self.add(base)

    def module(self, value: nn.Module) -> None:
        """A model without its weights."""
        for name, part in value.named_modules():
            self.word(name)
            self.add(type(part))
            own = {k: v for k, v in vars(part).items() if k not in _MODULE}
            fixed = {k: part._buffers.get(k) for k in sorted(part._non_persistent_buffers_set)}
            hooks = [hook for kind in HOOKS for hook in getattr(part, kind).values()]
            for key, held in [*sorted(own.items()), *fixed.items()]:
                self.word(key)
                if is_known(type(part)) and not _is_plain(held) and not _is_ones_own(held):
                    self.word(type(held).__qualname__)
                else:
                    self.add(held)
            self.add(hooks)
            self.word(_shown(part.extra_repr))

    def instance(self, value: Any) -> None:
        """An object by its class and what it holds; a library's by the user's functions that it holds."""
        kind = type(value)
        self.add(kind)
        slots = [s for base in kind.__mro__ for s in _slots(base)]
        held = {
            **getattr(value, "__dict__", {}),
            **{s: getattr(value, s) for s in slots if hasattr(value, s)},
        }
        if not is_known(kind):
            self.add({k: v for k, v in held.items() if isinstance(k, str)})
        elif isinstance(value, BuiltinFunctionType):
            self.word(f"{value.__module__}.{value.__qualname__}")
        elif dataclasses.is_dataclass(value):
            self.add({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
        else:
            for key in sorted(k for k, v in held.items() if isinstance(k, str) and _is_ones_own(v)):
                self.word(key)
                self.add(held[key])
            if not held and kind.__module__.partition(".")[0] in OURS:
                self.word(_shown(lambda: repr(value)))


_CLASS = {"__module__", "__doc__", "__dict__", "__weakref__", "__qualname__", "__firstlineno__"}
_CLASS |= {"__static_attributes__", "__annotations__", "__abstractmethods__", "_abc_impl", "__parameters__"}


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _is_ones_own(value: Any) -> bool:
    """Whether it is a function, a class or an object of the user's, and of no library."""
    if isinstance(value, functools.partial):
        return _is_ones_own(value.func)
    if isinstance(value, MethodType):
        return _is_ones_own(value.__func__)
    if isinstance(value, FunctionType | type):
        return not is_known(value)
    plain = value is None or isinstance(value, (*PLAIN, *CONTAINERS, ModuleType, BuiltinFunctionType))
    return not plain and not is_known(type(value))


def _unwrapped(part: Any) -> Any:
    """The functions behind a property or a method of the class."""
    if isinstance(part, staticmethod | classmethod):
        return part.__func__
    if isinstance(part, property):
        return (part.fget, part.fset, part.fdel)
    if isinstance(part, functools.cached_property):
        return part.func
    return part


def _names(code: CodeType) -> Iterator[str]:
    """What a function and those inside of it look up by name."""
    yield from dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_plain(value: Any) -> bool:
    """A value that a text can hold, or a tensor."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (*PLAIN, Tensor, np.ndarray))


def _shown(tell: Callable[[], str]) -> str:
    """What a thing says of itself, without its place in memory; some say nothing but an error."""
    try:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", tell())
    except Exception:
        return ""
