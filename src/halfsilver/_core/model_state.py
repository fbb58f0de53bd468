"""A pass over a model that leaves the model as it was: what it holds is recorded, compared and put back.

A forward pass may write: an embedding with ``max_norm`` renormalises the rows that it reads, a running mean moves, an
observer keeps the largest value that it saw. Whatever a private pass writes would reach the checkpoint without noise.
"""

from __future__ import annotations

import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from halfsilver.errors import ConfigError

# Of a module: what it computes with, as opposed to notes that it takes for others to read.
_HELD = ("_parameters", "_buffers", "_modules")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Container = list[Any] | dict[Any, Any] | set[Any] | deque[Any]
Place = tuple[int, torch.Size, tuple[int, ...], int] | None

# Generators that a module may hold: how to read their state, and how to set it.
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (lambda g: g.get_state().numpy().tobytes(), lambda g, s: g.set_state(_state_tensor(s))),
    np.random.Generator: (lambda g: g.bit_generator.state, lambda g, s: setattr(g.bit_generator, "state", s)),
    random.Random: (lambda g: g.getstate(), lambda g, s: g.setstate(s)),
}
_KINDS = tuple(_GENERATORS)
_FOLLOWED = (dict, list, tuple, set, deque, Tensor, nn.Module, np.ndarray, *_KINDS)
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set, deque})
# Most attributes are of these. Asking whether they are generators takes longer than all else.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), FunctionType, MethodType, torch.dtype})


@dataclass(slots=True)
class _Tensor:
    """A tensor with the place in memory, flags, version and values that it had.

    `memory` is the tensor again, without the dimensions over which it is expanded: it can be written to.
    """

    name: str
    tensor: Tensor
    alias: Tensor
    place: Place
    version: int
    leaf: bool
    learns: bool
    grad: Tensor | None
    attributes: dict[str, Any]
    memory: Tensor
    values: Tensor


@dataclass(slots=True)
class _Module:
    name: str
    module: nn.Module
    kind: type
    attributes: dict[str, Any]
    slots: dict[str, Any]


@final
class ModelState:
    """Everything that a model holds: parameters, frozen ones too, buffers, modules, modes and attributes.

    `record` notes it, and `put_back` restores it and names what had been written. In attributes of modules, tuples,
    lists, dicts, sets, arrays, generators and further modules are followed; objects of other classes are not.

    Guarantee: after ``put_back(values=True)`` every tensor has the memory and the bits that it had, and every module
    its class, members, attributes and mode. ``put_back(values=False)`` looks at identity and version alone. That is
    cheap enough for every pass, and misses only a write that bypasses autograd, through ``tensor.data`` or NumPy.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named = list(model.named_modules())
        self._modes = [module.training for _, module in self._named]
        self._modules: list[_Module] = []
        self._containers: list[tuple[str, Container, Container, bool]] = []
        self._generators: list[tuple[str, Any, Any]] = []
        self._tensors: list[_Tensor] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._walked = False

    @torch.no_grad()
    def record(self) -> None:
        """Note everything as it is now, in the modes that the modules had when this object was made.

        Raises `ConfigError` if the model has other modules than it had then, or a tensor that cannot be written back.
        """
        if self._walked and self._built_alike():
            self._tensors = [self._noted(t.name, t.tensor) for t in self._tensors]
            self._generators = [(name, g, _reader(g)[0](g)) for name, g, _ in self._generators]
        else:
            self._walk()
        self._copies = {id(t.tensor): (t.memory, t.values) for t in self._tensors}
        self._read_versions()

    def _built_alike(self) -> bool:
        """Whether modules and containers hold the very objects of the last record: a walk would find the same."""
        return all(_is_unchanged(module) for module in self._modules) and all(
            _same(container, copy) for _, container, copy, _ in self._containers
        )

    def _walk(self) -> None:
        if [id(module) for module in self._model.modules()] != [id(module) for _, module in self._named]:
            raise ConfigError("Expected the model to have the same modules as at the start. Make a new Trainer.")
        self._walked = False
        self._modules, self._containers, self._generators, self._tensors = [], [], [], []
        seen: set[int] = set()
        for name, t in (*self._model.named_parameters(), *self._model.named_buffers()):
            self._note(name, t, seen)
        for (_, module), mode in zip(self._named, self._modes, strict=True):
            if module.training is not mode:  # a callback may have left it in another
                module.training = mode
        self._note("", self._model, seen)
        self._walked = True

    def _note(self, place: str, value: Any, seen: set[int], *, held: bool = False) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if type(value) in _CONTAINERS:  # first, because there are many
            self._note_container(place, value, seen, held)
        elif isinstance(value, Tensor):
            self._tensors.append(self._noted(place.strip("."), value))
        elif isinstance(value, np.ndarray):
            if value.dtype.kind in "biufc" and value.flags.writeable and min(value.strides, default=0) >= 0:
                self._tensors.append(self._noted(place.strip("."), torch.from_numpy(value)))
        elif isinstance(value, nn.Module):
            self._note_module(place, value, seen)
        elif isinstance(value, _KINDS):
            self._generators.append((place.strip("."), value, _reader(value)[0](value)))
        else:
            self._note_container(place, value, seen, held)

    def _note_container(self, place: str, value: Any, seen: set[int], held: bool) -> None:
        if not isinstance(value, tuple):
            self._containers.append((place, value, _copied(value), held))
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if _is_followed(inner):
                self._note(f"{place}.{key}", inner, seen)

    def _note_module(self, name: str, module: nn.Module, seen: set[int]) -> None:
        slots = {key: getattr(module, key) for key in _slots(type(module)) if hasattr(module, key)}
        attributes = dict(vars(module))
        self._modules.append(_Module(name.strip("."), module, type(module), attributes, slots))
        for key, value in (*attributes.items(), *slots.items()):
            if _is_followed(value):
                self._note(name if key in _HELD else f"{name}.{key}", value, seen, held=key in _HELD)

    def _noted(self, name: str, t: Tensor) -> _Tensor:
        alias = t.detach()
        known, memory = self._copies.get(id(t)), _compact(alias)
        if known is not None and _alike(known[1], memory):
            values = known[1].copy_(memory)
        else:
            values = memory.clone()
            _require_writable(name, memory, values)
        grad = t.grad if t.is_leaf else None
        kept = dict(vars(t))
        return _Tensor(name, t, alias, _place(t), 0, t.is_leaf, t.requires_grad, grad, kept, memory, values)

    @torch.no_grad()
    def put_back(self, *, values: bool) -> list[str]:
        """Restore what differs from the record; the names of parameters, buffers, modules and modes that did.

        Attributes that are no tensors are restored without being named: many modules leave notes in them.
        """
        written: list[str] = []
        for module in self._modules:
            written += _put_module_back(module)
        for name, container, copy, held in self._containers:
            if (container or copy) and not _same(container, copy):
                written += _changed_keys(name, container, copy) if held else []
                _refill(container, copy)
        for name, generator, state in self._generators:
            read, write = _reader(generator)
            if read(generator) != state:
                write(generator, state)
                written.append(name)
        for noted in self._tensors:
            if noted.leaf and not noted.tensor.is_leaf:  # written to by an operation that has a gradient
                self._cut_graph(noted)
        found = [t.name for t in self._tensors if _put_tensor_back(t, values=values)]
        if found:  # tensors that share memory share a version too, which the last of them has moved
            self._read_versions()
        return written + found

    def _cut_graph(self, noted: _Tensor) -> None:
        """Take a tensor out of the graph. A view cannot be, so another one over the same memory takes its place."""
        old, new = noted.tensor, noted.alias
        if not old._is_view():
            old.detach_()
            return
        noted.tensor = new
        dicts = [d for m in self._modules for d in (m.attributes, vars(m.module))]
        for holder in [*dicts, *(c for _, container, copy, _ in self._containers for c in (container, copy))]:
            places: Any = holder.items() if isinstance(holder, dict) else enumerate(holder)
            for key, value in [*places] if not isinstance(holder, set) else ():
                if value is old:
                    holder[key] = new  # type: ignore[index]

    def _read_versions(self) -> None:
        for noted in self._tensors:
            noted.version = _version(noted.tensor)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A block after which the model is as it was before, to the bit, whatever was done to it and however it ends."""
    state = ModelState(model)
    state.record()
    try:
        yield
    finally:
        state.put_back(values=True)


def _is_unchanged(noted: _Module) -> bool:
    module = noted.module
    return (
        type(module) is noted.kind
        and _same_items(vars(module), noted.attributes)
        and all(getattr(module, key, None) is value for key, value in noted.slots.items())
    )


def _put_module_back(noted: _Module) -> list[str]:
    module, written = noted.module, []
    if type(module) is not noted.kind:
        module.__class__ = noted.kind
        written.append(f"the class of {noted.name!r}")
    if not _same_items(vars(module), noted.attributes):
        written += [f"the mode of {noted.name!r}"] * (module.training is not noted.attributes["training"])
        _refill(vars(module), noted.attributes)
    for key, value in noted.slots.items():
        if getattr(module, key, None) is not value:
            object.__setattr__(module, key, value)
    return written


def _put_tensor_back(noted: _Tensor, *, values: bool) -> bool:
    """Restore one tensor, and tell whether its place, version or values were not those of the record."""
    t, attributes = noted.tensor, vars(noted.tensor)
    if (attributes or noted.attributes) and not _same_items(attributes, noted.attributes):
        _refill(attributes, noted.attributes)
    if noted.leaf:
        if t.grad is not noted.grad:
            t.grad = noted.grad
        if t.requires_grad is not noted.learns:
            t.requires_grad_(noted.learns)
    moved = _place(t) != noted.place
    if moved:
        t.data = noted.alias
    if moved or _version(t) != noted.version or (values and not _same_bits(noted.memory, noted.values)):
        noted.memory.copy_(noted.values)
        return True
    return False


def _require_writable(name: str, memory: Tensor, values: Tensor) -> None:
    """Meet at the start, on public grounds, a tensor that could not be restored later."""
    try:
        memory.copy_(values)
    except RuntimeError as error:
        raise ConfigError(
            f"The tensor {name!r} of the model cannot be written to, so not restored: {error}."
        ) from error


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _place(t: Tensor) -> Place:
    """Where and how a tensor lies; None for layouts that have no one place."""
    return (t.data_ptr(), t.shape, t.stride(), int(t.storage_offset())) if t.layout == torch.strided else None


def _compact(t: Tensor) -> Tensor:
    """One of each number: dimensions over which a tensor is expanded are cut to length 1."""
    if t.layout == torch.strided:
        for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            if stride == 0 and size > 1:
                t = t.narrow(dim, 0, 1)
    return t


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


def _is_followed(value: Any) -> bool:
    return type(value) not in _PLAIN and isinstance(value, _FOLLOWED)


def _slots(kind: type) -> list[str]:
    """Attributes of instances that do not lie in their `__dict__`."""
    named = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    return [name for names in named for name in ([names] if isinstance(names, str) else names) if name != "__dict__"]


def _reader(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    return next(pair for kind, pair in _GENERATORS.items() if isinstance(generator, kind))


def _state_tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


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


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout off wherever a module has it as an option; modules stay in training mode, which Opacus's hooks need."""
    names = {module: name for module in model.modules() for name in ("p", "dropout") if _is_rate(module, name)}
    rates = {module: getattr(module, name) for module, name in names.items()}
    try:
        for module, name in names.items():
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name in names.items():
            setattr(module, name, rates[module])


def _is_rate(module: nn.Module, name: str) -> bool:
    kinds = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention)
    return isinstance(module, kinds) and isinstance(getattr(module, name, None), float)
