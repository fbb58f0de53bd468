"""Mirror maps: what happens to a released gradient before the optimizer sees it.

A map is post-processing. It is given the released (clipped, summed, noised, averaged) gradient, the
parameters and the public loss, and returns the direction that the optimizer takes for a gradient.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, cast, final

from torch import Tensor

from halfsilver._core.tensors import Tensors, norm, scale
from halfsilver.errors import ConfigError, require
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.schedules import Clock

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a map is told about one step besides the released gradient; later versions may add fields."""

    params: Tensors
    public: PublicLoss | None
    clock: Clock
    lr: float


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What a direction is made of where the public loss is separable: private * released + public * public gradient.

    `elementwise` says that a number of the direction depends on no other number of the released gradient.
    """

    private: float
    public: float = 0.0
    elementwise: bool = False


class MirrorMap(Protocol):
    """One way to use public data; every method of the library is a value of this protocol.

    `direction` never changes its arguments and is deterministic in them. State is a dict of tensors: the
    entries named in `persistent` belong in a checkpoint, the others are made again by `init`.
    """

    @property
    def persistent(self) -> tuple[str, ...]: ...

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State: ...

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]: ...


def need_public(public: PublicLoss | None, mirror: object) -> PublicLoss:
    """The public loss, or an error that says which map wanted it."""
    if public is None:
        raise ConfigError(
            f"{type(mirror).__name__} needs public data, got public=None. Give fit(private, public, ...); "
            "DP-SGD, which needs none, is Euclidean()."
        )
    return public


def clip_norm(tensors: Tensors, max_norm: float) -> Tensors:
    """`tensors` scaled to a norm of at most `max_norm`; the very same list where it is within already."""
    factor = clip_factor(tensors, max_norm)
    return tensors if factor == 1.0 else scale(tensors, factor)


def clip_factor(tensors: Tensors, max_norm: float) -> float:
    """What `clip_norm` multiplies `tensors` by; a norm that is NaN stays one."""
    size = norm(tensors)
    return 1.0 if size <= max_norm else max_norm / size


class Stateless:
    """For maps that remember nothing from step to step."""

    persistent: ClassVar[tuple[str, ...]] = ()

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        return {}


@final
@dataclass(frozen=True)
class Euclidean(Stateless):
    """The identity: plain DP-SGD."""

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        return released, state

    def mixture(self, released: Tensors, state: State, step: Step, *, curvature: float) -> Mixture:
        return Mixture(private=1.0, elementwise=True)


@final
@dataclass(frozen=True)
class ClipReleased(Stateless):
    """Scales the released gradient to a norm of at most `max_norm`."""

    max_norm: float

    def __post_init__(self) -> None:
        require(self.max_norm > 0, "max_norm", self.max_norm, "above 0")

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        return clip_norm(released, self.max_norm), state

    def mixture(self, released: Tensors, state: State, step: Step, *, curvature: float) -> Mixture:
        return Mixture(private=clip_factor(released, self.max_norm))


@final
@dataclass(frozen=True)
class Chain:
    """Maps applied one after the other; the state of map i is kept under the prefix "i."."""

    maps: tuple[MirrorMap, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "maps", tuple(map(partial(as_map, stacklevel=5), self.maps)))

    @property
    def persistent(self) -> tuple[str, ...]:
        return tuple(f"{i}.{name}" for i, m in enumerate(self.maps) for name in m.persistent)

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        states = (m.init(params=params, public=public) for m in self.maps)
        return {f"{i}.{name}": t for i, state in enumerate(states) for name, t in state.items()}

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        after: State = {}
        for i, m in enumerate(self.maps):
            released, part = m.direction(released, _part(state, i), step)
            after |= {f"{i}.{name}": t for name, t in part.items()}
        return released, after

    def mixture(self, released: Tensors, state: State, step: Step, *, curvature: float) -> Mixture | str:
        total = Mixture(private=1.0, elementwise=True)
        for i, m in enumerate(self.maps):
            one = mixture_of(m, released, _part(state, i), step, curvature=curvature)
            if isinstance(one, str):
                return one
            total = Mixture(
                private=one.private * total.private,
                public=one.private * total.public + one.public,
                elementwise=one.elementwise and total.elementwise,
            )
            if i + 1 < len(self.maps):
                released, _ = m.direction(released, _part(state, i), step)
        return total


def mixture_of(mirror: MirrorMap, released: Tensors, state: State, step: Step, *, curvature: float) -> Mixture | str:
    """What `mirror` says of a step, or why it cannot say: in words that go into an audit's report."""
    if not hasattr(mirror, "mixture"):
        return f"{mirror!r} has no method `mixture`"
    mix: Mixture | str = mirror.mixture(released, state, step, curvature=curvature)
    if isinstance(mix, Mixture) and mix.private == 0:
        return f"{mirror!r} lets nothing through that was released in step {step.clock.step}"
    return mix


def _part(state: State, i: int) -> State:
    """The state of map `i` of a chain, under the names that the map gave it."""
    return {name.removeprefix(f"{i}."): t for name, t in state.items() if name.startswith(f"{i}.")}


def chain(*maps: MirrorMap) -> Chain:
    """Apply `maps` in order, each to the output of the one before.

    >>> chain(clip_released(1.0), Euclidean()).maps[0]
    ClipReleased(max_norm=1.0)
    """
    return Chain(maps)


def clip_released(max_norm: float) -> ClipReleased:
    """Clip the released gradient once more, as the paper does for images: free post-processing."""
    return ClipReleased(max_norm)


# ---- maps that were written for version 0.1

_EARLIER = ("params", "public", "clock", "lr")


def as_map(mirror: Any, *, stacklevel: int = 3) -> MirrorMap:
    """`mirror` as the trainer calls it; called once, wherever the library is given a map.

    Up to version 0.1 `direction` took params, public, clock and lr as keyword arguments. A map with that signature
    works until version 0.3 and sets off a `DeprecationWarning`.

    Raises:
        ConfigError: If `direction` can be called neither as it is now nor as it was.
    """
    call = inspect.signature(mirror.direction)
    if _takes(call, 3):
        return cast(MirrorMap, mirror)
    name = type(mirror).__name__
    if not _takes(call, 2, *_EARLIER):
        raise ConfigError(
            f"Expected {name}.direction(released, state, step), got {name}.direction{call}. The parameters, the public "
            "loss, the clock and the learning rate are step.params, step.public, step.clock and step.lr."
        )
    warnings.warn(
        f"{name}.direction{call} is the signature of version 0.1, which goes in version 0.3. Write "
        "direction(self, released, state, step) and read step.params, step.public, step.clock and step.lr.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return _Earlier(mirror)


def _takes(call: inspect.Signature, positional: int, *keywords: str) -> bool:
    try:
        call.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


@final
class _Earlier:
    """A map with the keyword arguments of version 0.1, called with a `Step`."""

    def __init__(self, mirror: Any) -> None:
        self._mirror = mirror

    def __repr__(self) -> str:
        return repr(self._mirror)  # run folders name the map, and those of before must open

    @property
    def persistent(self) -> tuple[str, ...]:
        return tuple(self._mirror.persistent)

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        return cast(State, self._mirror.init(params=params, public=public))

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        options = {name: getattr(step, name) for name in _EARLIER}
        return cast("tuple[Tensors, State]", self._mirror.direction(released, state, **options))
