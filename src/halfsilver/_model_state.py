"""A pass over a model that leaves the model as it was: what it holds is recorded, compared and put back.

A forward pass may write: an embedding with ``max_norm`` renormalises the rows that it reads, a running mean moves, an
observer keeps the largest value that it saw. Whatever a private pass writes would reach the checkpoint without noise.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from halfsilver.errors import ConfigError

# Of a module: what it computes with, as opposed to notes that it takes for others to read.
_HELD = ("_parameters", "_buffers", "_modules")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_FOLLOWED = (Tensor, list, dict, set, deque)

Container = list[Any] | dict[Any, Any] | set[Any] | deque[Any]


@dataclass(slots=True)
class _Tensor:
    """A tensor with the memory, flags, version and values that it had."""

    name: str
    tensor: Tensor
    memory: Tensor
    version: int
    learns: bool
    grad: Tensor | None
    attributes: dict[str, Any]
    values: Tensor


@final
class ModelState:
    """Everything that a model holds: parameters, frozen ones too, buffers, modules, modes and attributes.

    `record` notes it, and `put_back` restores it and names what had been written. Lists, dicts and sets in attributes
    of modules are followed, and so are tensors in them; objects of other classes are not.

    Guarantee: after ``put_back(values=True)`` every tensor has the memory and the bits that it had, and every module
    its members, attributes and mode. ``put_back(values=False)`` looks at identity and version alone. That is cheap
    enough for every pass, and misses only a write that bypasses autograd, through ``tensor.data`` or NumPy.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.named_modules())
        self._modes = [module.training for _, module in self._modules]
        self._attributes: list[tuple[str, nn.Module, dict[str, Any]]] = []
        self._containers: list[tuple[str, Container, Container, bool]] = []
        self._tensors: list[_Tensor] = []
        self._copies: dict[int, Tensor] = {}

    @torch.no_grad()
    def record(self) -> None:
        """Note everything as it is now, in the modes that the modules had when this object was made.

        Raises `ConfigError` if the model has other modules than it had then.
        """
        if [id(module) for module in self._model.modules()] != [id(module) for _, module in self._modules]:
            raise ConfigError("Expected the model to have the same modules as at the start. Make a new Trainer.")
        self._attributes, self._containers, self._tensors = [], [], []
        seen: set[int] = set()
        for name, t in (*self._model.named_parameters(), *self._model.named_buffers()):
            self._note(name, t, seen)
        for (name, module), mode in zip(self._modules, self._modes, strict=True):
            if module.training is not mode:  # a callback may have left it in another
                module.training = mode
            attributes = dict(vars(module))
            self._attributes.append((name, module, attributes))
            for key, value in attributes.items():
                if isinstance(value, _FOLLOWED):
                    self._note(name if key in _HELD else f"{name}.{key}", value, seen, held=key in _HELD)
        self._copies = {id(t.tensor): t.values for t in self._tensors}

    def _note(self, place: str, value: Any, seen: set[int], *, held: bool = False) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            self._tensors.append(self._noted(place.strip("."), value))
            return
        pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)
        self._containers.append((place, value, _copied(value), held))
        for key, inner in pairs:
            if isinstance(inner, _FOLLOWED):
                self._note(f"{place}.{key}", inner, seen)

    def _noted(self, name: str, t: Tensor) -> _Tensor:
        memory, values = t.detach(), self._copies.get(id(t))
        if values is None or not _alike(values, memory):
            values = memory.clone()
        else:
            values.copy_(memory)
        grad = t.grad if t.is_leaf else None
        return _Tensor(name, t, memory, _version(t), t.requires_grad, grad, dict(vars(t)), values)

    @torch.no_grad()
    def put_back(self, *, values: bool) -> list[str]:
        """Restore what differs from the record; the names of parameters, buffers, modules and modes that did.

        Attributes that are no tensors are restored without being named: many modules leave notes in them.
        """
        written: list[str] = []
        for name, module, attributes in self._attributes:
            if not _same_items(vars(module), attributes):
                written += [f"the mode of {name!r}"] * (module.training is not attributes["training"])
                _refill(vars(module), attributes)
        for name, container, copy, held in self._containers:
            if (container or copy) and not _same(container, copy):
                written += _changed_keys(name, container, copy) if held else []
                _refill(container, copy)
        return written + [t.name for t in self._tensors if _put_back(t, values=values)]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A block after which the model is as it was before, to the bit, whatever was done to it and however it ends."""
    state = ModelState(model)
    state.record()
    try:
        yield
    finally:
        state.put_back(values=True)


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _put_back(noted: _Tensor, *, values: bool) -> bool:
    """Restore one tensor, and tell whether its memory, version or values were not those of the record."""
    t, memory, attributes = noted.tensor, noted.memory, vars(noted.tensor)
    if (attributes or noted.attributes) and not _same_items(attributes, noted.attributes):
        _refill(attributes, noted.attributes)
    if t.is_leaf:
        if t.grad is not noted.grad:
            t.grad = noted.grad
        if t.requires_grad is not noted.learns:
            t.requires_grad_(noted.learns)
    moved = not _alike(t, memory) or t.data_ptr() != memory.data_ptr()
    if moved:
        t.data = memory
    if moved or _version(t) != noted.version or (values and not _same_bits(memory, noted.values)):
        memory.copy_(noted.values)
        noted.version = _version(t)
        return True
    return False


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.layout == b.layout


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bytes: as numbers, 0.0 and -0.0 are equal and NaN is not."""
    if a.layout != torch.strided or a.is_quantized:
        return True  # only the version shows a write to these
    a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (a, b))
    kind, wide = _INTEGERS[a.element_size()], 8 // a.element_size()
    whole = a.numel() // wide * wide
    if not whole or a.storage_offset() % wide or b.storage_offset() % wide or not _dense(a, b):
        return torch.equal(a.view(kind), b.view(kind))
    # Eight bytes at once, which is three times as fast.
    flat = [t.as_strided((t.numel(),), (1,)) for t in (a, b)]
    heads, tails = ([t[:whole].view(torch.int64) for t in flat], [t[whole:].view(kind) for t in flat])
    return torch.equal(*heads) and torch.equal(*tails)


def _dense(a: Tensor, b: Tensor) -> bool:
    """Whether both lie in memory without gaps, in one order."""
    formats = (torch.contiguous_format, *([torch.channels_last] if a.dim() == 4 else []))
    return any(a.is_contiguous(memory_format=f) and b.is_contiguous(memory_format=f) for f in formats)


def _same_items(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a.values(), b.values())) and all(map(operator.eq, a, b))


def _same(a: Container, b: Container) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return _same_items(a, b)
    if isinstance(a, set):
        return len(a) == len(b) and {id(x) for x in a} == {id(x) for x in b}
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _copied(value: Container) -> Container:
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def _refill(container: Any, copy: Any) -> None:
    container.clear()
    container.extend(copy) if isinstance(container, list | deque) else container.update(copy)


def _changed_keys(name: str, now: Any, before: Any) -> list[str]:
    keys = [key for key in {**now, **before} if now.get(key) is not before.get(key)]
    return [f"{name}.{key}".strip(".") for key in keys]
