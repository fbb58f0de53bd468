"""Mirror maps: what happens to a released gradient before the optimizer sees it.

A map is post-processing. It is given the released (clipped, summed, noised, averaged) gradient, the
parameters and the public loss, and returns the direction that the optimizer takes for a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, final

from torch import Tensor

from halfsilver._core.tensors import Tensors, norm, scale
from halfsilver.errors import ConfigError, require
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.schedules import Clock

State = dict[str, Tensor]


class MirrorMap(Protocol):
    """One way to use public data; every method of the library is a value of this protocol.

    `direction` never changes its arguments and is deterministic in them. State is a dict of tensors: the
    entries named in `persistent` belong in a checkpoint, the others are made again by `init`.
    """

    @property
    def persistent(self) -> tuple[str, ...]: ...

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State: ...

    def direction(
        self,
        released: Tensors,
        state: State,
        *,
        params: Tensors,
        public: PublicLoss | None,
        clock: Clock,
        lr: float,
    ) -> tuple[Tensors, State]: ...


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
    size = norm(tensors)
    return tensors if size <= max_norm else scale(tensors, max_norm / size)


@final
@dataclass(frozen=True)
class Euclidean:
    """The identity: plain DP-SGD."""

    persistent: ClassVar[tuple[str, ...]] = ()

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        return {}

    def direction(
        self,
        released: Tensors,
        state: State,
        *,
        params: Tensors,
        public: PublicLoss | None,
        clock: Clock,
        lr: float,
    ) -> tuple[Tensors, State]:
        return released, state


@final
@dataclass(frozen=True)
class ClipReleased:
    """Scales the released gradient to a norm of at most `max_norm`."""

    max_norm: float
    persistent: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        require(self.max_norm > 0, "max_norm", self.max_norm, "above 0")

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        return {}

    def direction(
        self,
        released: Tensors,
        state: State,
        *,
        params: Tensors,
        public: PublicLoss | None,
        clock: Clock,
        lr: float,
    ) -> tuple[Tensors, State]:
        return clip_norm(released, self.max_norm), state


@final
@dataclass(frozen=True)
class Chain:
    """Maps applied one after the other; the state of map i is kept under the prefix "i."."""

    maps: tuple[MirrorMap, ...]

    @property
    def persistent(self) -> tuple[str, ...]:
        return tuple(f"{i}.{name}" for i, m in enumerate(self.maps) for name in m.persistent)

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        states = (m.init(params=params, public=public) for m in self.maps)
        return {f"{i}.{name}": t for i, state in enumerate(states) for name, t in state.items()}

    def direction(
        self,
        released: Tensors,
        state: State,
        *,
        params: Tensors,
        public: PublicLoss | None,
        clock: Clock,
        lr: float,
    ) -> tuple[Tensors, State]:
        after: State = {}
        for i, m in enumerate(self.maps):
            own = {name.removeprefix(f"{i}."): t for name, t in state.items() if name.startswith(f"{i}.")}
            released, own = m.direction(released, own, params=params, public=public, clock=clock, lr=lr)
            after |= {f"{i}.{name}": t for name, t in own.items()}
        return released, after


def chain(*maps: MirrorMap) -> Chain:
    """Apply `maps` in order, each to the output of the one before.

    >>> chain(clip_released(1.0), Euclidean()).maps[0]
    ClipReleased(max_norm=1.0)
    """
    return Chain(maps)


def clip_released(max_norm: float) -> ClipReleased:
    """Clip the released gradient once more, as the paper does for images: free post-processing."""
    return ClipReleased(max_norm)
