"""Mirror maps: what happens to a released gradient before the optimizer sees it.

A map is post-processing. It is given the released (clipped, summed, noised, averaged) gradient, the
parameters and the public loss, and returns the direction that the optimizer takes for a gradient.
"""

from __future__ import annotations

import inspect
import re
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
    """What a map is told about one step besides the released gradient.

    Everything in it is public or released. Later versions may add fields, so build one with keywords only.

    Args:
        params: The trainable parameters before the update, in the order of the model. A map must not change them.
        public: The loss on the public data, or None where `fit` was given none.
        clock: The position in the run: step, number of steps, steps per epoch.
        lr: The learning rate of the optimizer's first parameter group in this step, at least 0.

    Example:
        >>> import torch
        >>> from halfsilver.mirror import Clock
        >>> step = Step(params=[torch.zeros(2)], public=None, clock=Clock(step=0, total_steps=10), lr=0.1)
        >>> step.clock.step
        0
    """

    params: Tensors
    public: PublicLoss | None
    clock: Clock
    lr: float


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What one direction is made of: ``private * released + public * public_gradient``.

    The formula is about parameters whose public loss is ``curvature / 2`` times their square and independent of all
    others. `halfsilver.audit` trains such parameters beside the model, and computes from their updates what was
    released.

    Args:
        private: The factor of the released gradient. It may differ from step to step, and must not be 0 for the
            released values to be readable.
        public: The factor of the public gradient. Default 0.
        elementwise: True if each number of the direction depends on one number of the released gradient only. The
            audit then also compares the rest of the model between neighbouring runs. Default False.

    Example:
        >>> Mixture(private=0.5, public=0.5, elementwise=True).private
        0.5
    """

    private: float
    public: float = 0.0
    elementwise: bool = False


class MirrorMap(Protocol):
    """The protocol of a mirror map: how the released gradient becomes the direction that the optimizer is given.

    A map sees public data and released values only. By the post-processing property of differential privacy it cannot
    change the privacy guarantee.

    A map may also have a method ``mixture(released, state, step, *, curvature)`` that returns a `Mixture`, or a string
    that says why there is none. `halfsilver.audit` uses it to compute released values from updates of the model. If it
    is missing, the audit reads what the map was given, and its report says so.

    Example:
        A map that halves the gradient. `Stateless` provides `persistent` and `init`.

        >>> import torch
        >>> from halfsilver.mirror import Clock, Stateless, Step
        >>> class Halve(Stateless):
        ...     def direction(self, released, state, step):
        ...         return [g / 2 for g in released], state
        >>> step = Step(params=[torch.zeros(1)], public=None, clock=Clock(step=0, total_steps=1), lr=0.1)
        >>> Halve().direction([torch.ones(1)], {}, step)
        ([tensor([0.5000])], {})

    References:
        Dwork and Roth, *The Algorithmic Foundations of Differential Privacy*, 2014, proposition 2.1 (post-processing)
    """

    @property
    def persistent(self) -> tuple[str, ...]:
        """Names of the state tensors that a checkpoint must hold. `init` computes all others again."""

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        """The state before the first step, and after a restart.

        Args:
            params: The trainable parameters at the start.
            public: The loss on the public data, or None where there are none.

        Returns:
            Tensors by name. An empty dict if the map remembers nothing.

        Raises:
            ConfigError: If the map needs public data that it is not given. Raise it here, before a private record
                is read.
        """

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        """The direction of one step. A pure function: deterministic, and without changes to its arguments.

        Args:
            released: The noisy mean of the clipped gradients, one tensor for each parameter.
            state: What `init` or the step before returned.
            step: Parameters, public loss, clock and learning rate.

        Returns:
            The direction, in the shapes, dtypes and on the devices of the parameters, and the next state, with the
            names of the old one.
        """


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
    """Base class for maps that remember nothing from step to step: an empty `persistent`, and an `init` without state.

    Example:
        >>> Stateless().init(params=[], public=None)
        {}
    """

    persistent: ClassVar[tuple[str, ...]] = ()

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        return {}


@final
@dataclass(frozen=True)
class Euclidean(Stateless):
    """Plain DP-SGD: the direction is the released gradient.

    It is the mirror step with ``Psi(theta) = |theta|^2 / 2``. It uses no public data.

    Example:
        >>> import torch
        >>> from halfsilver.mirror import Clock, Step
        >>> step = Step(params=[torch.zeros(1)], public=None, clock=Clock(step=0, total_steps=1), lr=0.1)
        >>> Euclidean().direction([torch.ones(1)], {}, step)
        ([tensor([1.])], {})

    References:
        Abadi et al., *Deep Learning with Differential Privacy*, CCS 2016, arXiv:1607.00133
    """

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        return released, state

    def mixture(self, released: Tensors, state: State, step: Step, *, curvature: float) -> Mixture:
        return Mixture(private=1.0, elementwise=True)


@final
@dataclass(frozen=True)
class ClipReleased(Stateless):
    """The map that `clip_released` makes: ``released * min(1, max_norm / |released|)``.

    Args:
        max_norm: The largest norm of the whole released gradient, above 0.
    """

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
    """The map that `chain` makes. The state of map i is kept under the prefix ``"i."``.

    Args:
        maps: The maps, the first of which is given the released gradient.
    """

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

    Args:
        maps: Any number of mirror maps. The first is given the released gradient, and the optimizer is given the output
            of the last. Without any, the chain is `Euclidean`.

    Returns:
        One map. It needs public data if one of `maps` does.

    Raises:
        ConfigError: If the `direction` of a map cannot be called with a released gradient, a state and a step.

    Example:
        >>> chain(clip_released(1.0), Euclidean()).maps[0]
        ClipReleased(max_norm=1.0)
    """
    return Chain(maps)


def clip_released(max_norm: float) -> ClipReleased:
    """A map that clips the released gradient: ``released * min(1, max_norm / |released|)``.

    The clip norm of the plan bounds the gradient of each record before the noise. This one bounds the noisy mean of a
    step, whose noise grows with the number of parameters. It is post-processing and costs no privacy. Amid et al. use
    it for images.

    Args:
        max_norm: The largest norm of the whole gradient, above 0. Choose it below the norm of the noise, which is about
            ``noise_multiplier * max_grad_norm * sqrt(parameters) / expected_batch_size``, or it does little.

    Returns:
        A map, for use alone or in a `chain`.

    Raises:
        ConfigError: If `max_norm` is not above 0.

    Example:
        >>> import torch
        >>> from halfsilver.mirror import Clock, Step
        >>> step = Step(params=[torch.zeros(2)], public=None, clock=Clock(step=0, total_steps=1), lr=0.1)
        >>> clip_released(1.0).direction([torch.tensor([3.0, 4.0])], {}, step)[0]
        [tensor([0.6000, 0.8000])]

    References:
    Amid et al., *Public Data-Assisted Mirror Descent for Private Model Training*, ICML 2022, arXiv:2112.00193
    """
    return ClipReleased(max_norm)


# ---- maps that were written for version 0.1

_EARLIER = ("params", "public", "clock", "lr")


def described(mirror: MirrorMap) -> str:
    """The map in words that do not differ from process to process, as an address would.

    Args:
        mirror: The map.
    """
    return re.sub(r" at 0x[0-9a-f]+", "", repr(mirror))


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
