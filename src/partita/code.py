"""What a function or an object does, as a few hexadecimal digits: two versions of a loss are told apart.

The same text gives the same digits in every process of one version of Python. What Partita, PyTorch, NumPy
and Python bring is known by its name, since a run notes their versions; all else is known by its bytecode,
its constants, its defaults, what it closes over, and the functions and values that it calls by name.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DIGITS = 12
PLAIN = (bool, int, float, complex, str, bytes)
CONTAINERS = (list, tuple, set, frozenset, Mapping)
LIBRARIES = {"partita", "torch", "numpy", *sys.stdlib_module_names} - {"__main__"}
_MODULE = set(vars(nn.Module())) - {"training"}  # what every module has: its tensors, its parts, hooks


def digest(value: Any) -> str:
    """The digits of a value, whatever it is."""
    found = _Digest()
    try:
        found.add(value)
    except RecursionError:  # too deep to look into: known by the name of its kind
        found = _Digest()
        found.word(type(value).__qualname__)
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
    """Whether a function or a class is a library's."""
    return (getattr(value, "__module__", None) or "").partition(".")[0] in LIBRARIES


class _Digest:
    """A walk through what decides what a value does; functions, classes and objects are walked once."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.met: dict[int, tuple[int, Any]] = {}  # with the object: its number must not go to another
        self.inside: set[int] = set()  # of which containers the walk is in

    def hexdigest(self) -> str:
        """What was walked so far, in digits."""
        return self.hash.hexdigest()[:DIGITS]

    def word(self, text: str) -> None:
        """Text, with its length: 'ab', 'c' is not 'a', 'bc'."""
        part = text.encode(errors="surrogatepass")
        self.hash.update(f"{len(part)}:".encode() + part)

    def add(self, value: Any) -> None:
        """Any value."""
        if value is None or isinstance(value, PLAIN):
            self.word(f"{type(value).__name__} {value!r}")
        elif isinstance(value, CodeType):
            self.code(value)
        elif isinstance(value, CONTAINERS):  # equal ones may be one object here and two in another process
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
            flat = value.cpu().contiguous().reshape(-1)
            self.hash.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")

    def function(self, value: FunctionType) -> None:
        """A library's by its name, another by what it does; both by what they close over."""
        self.word(f"function {value.__qualname__ if is_known(value) else ''}")
        for cell in value.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not filled yet
                self.word("empty")
        if is_known(value):
            self.word(str(value.__module__))
            return
        self.code(value.__code__, doc=value.__doc__)
        self.add((value.__defaults__, value.__kwdefaults__))
        own = {k: v for k, v in vars(value).items() if k != "__wrapped__"}
        self.add(own)
        for name in sorted(_names(value.__code__)):
            if name in value.__globals__:
                self.named(name, value.__globals__[name])

    def named(self, name: str, value: Any) -> None:
        """Of what a function finds by a name in its file: functions, classes and plain values."""
        self.word(name)
        if isinstance(value, ModuleType):
            self.word(value.__name__)
        elif callable(value) or _is_plain(value):
            self.add(value)
        else:
            self.word(type(value).__qualname__)

    def code(self, code: CodeType, doc: str | None = None) -> None:
        """Bytecode and constants; not its lines, its file or its docstring."""
        self.hash.update(code.co_code)
        self.hash.update(code.co_exceptiontable)
        self.word(f"{code.co_argcount} {code.co_kwonlyargcount} {code.co_posonlyargcount} {code.co_flags}")
        self.add(code.co_names)
        constants = code.co_consts
        self.add(constants[1:] if doc is not None and constants[:1] == (doc,) else constants)

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
            own = {k: v for k, v in vars(part).items() if k not in _MODULE and not isinstance(v, Tensor)}
            for key in sorted(own):
                self.named(key, own[key])
            self.word(_shown(part.extra_repr))

    def instance(self, value: Any) -> None:
        """An object by its class and what it holds, a library's by what it says of itself."""
        kind = type(value)
        self.add(kind)
        if not is_known(kind):
            self.add({k: v for k, v in getattr(value, "__dict__", {}).items() if isinstance(k, str)})
        elif isinstance(value, BuiltinFunctionType):
            self.word(f"{value.__module__}.{value.__qualname__}")
        else:
            self.word(_shown(lambda: repr(value)))


_CLASS = {"__module__", "__doc__", "__dict__", "__weakref__", "__qualname__", "__firstlineno__"}
_CLASS |= {"__static_attributes__", "__annotations__", "__abstractmethods__", "_abc_impl", "__parameters__"}


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
    if isinstance(value, Mapping):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (*PLAIN, Tensor, np.ndarray))


def _shown(tell: Callable[[], str]) -> str:
    """What a thing says of itself, without its place in memory; some say nothing but an error."""
    try:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", tell())
    except Exception:
        return ""
