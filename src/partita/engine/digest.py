"""Digests of what functions and objects do, in a few hexadecimal digits: two versions of a loss differ.

The same source gives the same digest in every process of one version of Python. What installed packages bring
is hashed by its name, since a run notes the versions of those that it computes with; all else is hashed by
its bytecode, its constants, its defaults, what it closes over, and the functions and values that it calls by
name. No source shows everything (an object in the user's file, an import inside a function): a trial of the
model, the loss and the metric (`partita.engine.model.probe.tried`) shows the rest.
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
DEPTH = 60  # of the walk: what is deeper is hashed by the name of its class
PLAIN = (bool, int, float, complex, str, bytes)
CONTAINERS = (list, tuple, set, frozenset, Mapping)
LIBRARIES = {"partita", "torch", "numpy", *sys.stdlib_module_names} - {"__main__"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_MODULE = set(vars(nn.Module())) - {"training"}  # what every module has: its tensors, its parts, hooks
_CLASS = {"__module__", "__doc__", "__dict__", "__weakref__", "__qualname__", "__firstlineno__"}
_CLASS |= {"__static_attributes__", "__annotations__", "__abstractmethods__", "_abc_impl", "__parameters__"}


def digest(value: Any) -> str:
    """Return the digest of any value."""
    walk = _Walk()
    walk.add(value)
    return walk.hexdigest()


def structure_digest(model: nn.Module) -> str:
    """Return the digest of a model without its weights: its layers, their settings and their code."""
    walk = _Walk()
    walk.module(model)
    return walk.hexdigest()


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of all bits of named tensors; each is read once."""
    walk = _Walk()
    for name, tensor in tensors.items():
        walk.word(name)
        walk.tensor(tensor)
    return walk.hexdigest()


def is_told_by_name(value: Any) -> bool:
    """Return whether name and version say all of it: it is a plain function or class of a library."""
    if isinstance(value, FunctionType):
        return is_installed(value) and value.__closure__ is None
    return isinstance(value, BuiltinFunctionType | type) and is_installed(value)


def is_installed(value: Any) -> bool:
    """Return whether a function, a class or a module is of an installed package."""
    if isinstance(value, FunctionType):  # it may have the name of another that it wraps
        module = value.__globals__.get("__name__")
    else:
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    package = str(module or "").partition(".")[0]
    if package in LIBRARIES:
        return True
    module = sys.modules.get(package)
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


class _Walk:
    """A walk through what decides what a value does; functions, classes and objects are visited once."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.visited: dict[int, tuple[int, Any]] = {}  # by id, with the object: an id must not be reused
        self.inside: set[int] = set()  # ids of the containers that the walk is in
        self.depth = 0

    def hexdigest(self) -> str:
        """Return the digest of the walk so far."""
        return self.hash.hexdigest()[:DIGITS]

    def word(self, text: str) -> None:
        """Add text, with its length: 'ab', 'c' is not 'a', 'bc'."""
        part = text.encode(errors="surrogatepass")
        self.hash.update(f"{len(part)}:".encode() + part)

    def add(self, value: Any) -> None:
        """Add any value; what cannot be looked into is hashed by the name of its class."""
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
        elif id(value) in self.visited:
            self.word(f"again {self.visited[id(value)][0]}")
        else:
            self.visited[id(value)] = len(self.visited), value
            self.visit(value)

    def container(self, value: Any) -> None:
        """Add what a container holds."""
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

    def visit(self, value: Any) -> None:
        """Add an object by its type."""
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
            self.class_(value)
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
        """Add the type, the shape and all bits of a tensor."""
        value = value.detach()
        self.word(f"{value.dtype} {tuple(value.shape)}")
        if value.layout is torch.strided and not value.is_meta:
            flat = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            self.hash.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")

    def function(self, value: FunctionType) -> None:
        """Add a function: a library's by its name, another by what it does; both by what they close over."""
        known = is_installed(value)
        self.word(f"function {value.__qualname__ if known else ''}")
        for cell in value.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                self.word("empty")
                continue
            if not known or _is_users(held) or _is_plain(held):
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
        """Add what a function finds by a name in its file: functions, classes and immutable values.

        A list or an object there may be what the function counts in. Of a module of the user's, add what the
        function calls by name.
        """
        self.word(name)
        if isinstance(value, ModuleType):
            self.word(value.__name__)
            for part in [] if is_installed(value) or id(value) in self.inside else names:
                if part in vars(value):
                    self.inside.add(id(value))
                    self.named(part, vars(value)[part], names)
                    self.inside.discard(id(value))
        elif callable(value) or (_is_plain(value) and not isinstance(value, list | dict | set)):
            self.add(value)
        else:
            self.word(type(value).__qualname__)

    def code(self, code: CodeType) -> None:
        """Add instructions and their constants; not the lines, the file or the docstring."""
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

    def class_(self, value: type) -> None:
        """Add a class by its functions and values, and those of its bases."""
        self.word(f"class {value.__qualname__}")
        if is_installed(value):
            self.word(value.__module__)
            return
        for name, part in sorted(vars(value).items()):
            if name not in _CLASS:
                self.word(name)
                self.add(_unwrapped(part))
        for base in value.__bases__:
            self.add(base)

    def module(self, value: nn.Module) -> None:
        """Add a model without its weights."""
        for name, part in value.named_modules():
            self.word(name)
            self.add(type(part))
            own = {k: v for k, v in vars(part).items() if k not in _MODULE}
            fixed = {k: part._buffers.get(k) for k in sorted(part._non_persistent_buffers_set)}
            hooks = [hook for kind in HOOKS for hook in getattr(part, kind).values()]
            for key, held in [*sorted(own.items()), *fixed.items()]:
                self.word(key)
                if is_installed(type(part)) and not _is_plain(held) and not _is_users(held):
                    self.word(type(held).__qualname__)
                else:
                    self.add(held)
            self.add(hooks)
            self.word(_text(part.extra_repr))

    def instance(self, value: Any) -> None:
        """Add an object by its class and attributes; a library's by the user's functions among them."""
        kind = type(value)
        self.add(kind)
        slots = [s for base in kind.__mro__ for s in _slots(base)]
        held = {
            **getattr(value, "__dict__", {}),
            **{s: getattr(value, s) for s in slots if hasattr(value, s)},
        }
        if not is_installed(kind):
            self.add({k: v for k, v in held.items() if isinstance(k, str)})
        elif isinstance(value, BuiltinFunctionType):
            self.word(f"{value.__module__}.{value.__qualname__}")
        elif dataclasses.is_dataclass(value):
            self.add({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
        else:
            for key in sorted(k for k, v in held.items() if isinstance(k, str) and _is_users(v)):
                self.word(key)
                self.add(held[key])
            if not held and kind.__module__.partition(".")[0] in LIBRARIES:
                self.word(_text(lambda: repr(value)))


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_users(value: Any) -> bool:
    """Return whether it is a function, a class or an object of the user's, and of no library."""
    if isinstance(value, functools.partial):
        return _is_users(value.func)
    if isinstance(value, MethodType):
        return _is_users(value.__func__)
    if isinstance(value, FunctionType | type):
        return not is_installed(value)
    plain = value is None or isinstance(value, (*PLAIN, *CONTAINERS, ModuleType, BuiltinFunctionType))
    return not plain and not is_installed(type(value))


def _unwrapped(part: Any) -> Any:
    """Return the functions behind a property or a method of a class."""
    if isinstance(part, staticmethod | classmethod):
        return part.__func__
    if isinstance(part, property):
        return (part.fget, part.fset, part.fdel)
    if isinstance(part, functools.cached_property):
        return part.func
    return part


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and those inside of it look up."""
    yield from dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a plain one, a container of such, or a tensor."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (*PLAIN, Tensor, np.ndarray))


def _text(describe: Callable[[], str]) -> str:
    """Return an object's text without its address in memory; empty for one that fails to give it."""
    try:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", describe())
    except Exception:
        return ""
