"""One contract for every mirror map: what the trainer relies on, whatever the method."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfsilver._core.tensors import norm, trainable
from halfsilver.auditing import loops
from halfsilver.mirror import (
    Bregman,
    Clock,
    DualAveraging,
    Euclidean,
    FallBack,
    FirstOrder,
    GradientBall,
    Intersection,
    L2Ball,
    MirrorMap,
    PublicLoss,
    Quadratic,
    State,
    Stateless,
    Step,
    chain,
    clip_released,
    cosine,
)
from halfsilver.mirror.base import mixture_of

MakePublic = Callable[..., PublicLoss]
Released = Callable[[PublicLoss], list[Tensor]]

EXACT: dict[str, MirrorMap] = {
    "quadratic": Quadratic(),
    "quadratic-damped": Quadratic(damping=0.1),
    "quadratic-given": Quadratic(torch.diag(torch.arange(1.0, 9.0))),
    "quadratic-cg": Quadratic(dense_limit=0),
    "quadratic-cg-given": Quadratic(torch.diag(torch.arange(1.0, 9.0)), dense_limit=0),
    "bregman": Bregman(),
    "bregman-gradient-only": Bregman(gradient_only=True),
    "bregman-spectral": Bregman(quadratic=True),
    "bregman-ball": Bregman(constraint=L2Ball(100.0)),
    "bregman-gradient-ball": Bregman(quadratic=True, constraint=GradientBall(5.0)),
    "bregman-intersection": Bregman(quadratic=True, constraint=Intersection(L2Ball(100.0), GradientBall(5.0))),
    "dual": DualAveraging(damping=0.0),
    "dual-spectral": DualAveraging(damping=0.0, quadratic=True),
    "dual-ball": DualAveraging(damping=0.0, constraint=L2Ball(100.0)),
    "chain-dual": chain(clip_released(1.0), DualAveraging(damping=0.0)),
}
# Every map that is audited is held to the contract, too.
MAPS: dict[str, MirrorMap] = (
    EXACT
    | {f"audited-{name}": mirror for name, mirror in loops.MAPS.items()}
    | {
        "euclidean": Euclidean(),
        "first-order": FirstOrder(0.5),
        "first-order-cosine": FirstOrder(cosine(end=0.2), public_max_norm=0.1),
        "fall-back": FallBack(FirstOrder(0.5)),
        "clip": clip_released(0.5),
        "chain": chain(clip_released(1.0), FirstOrder(0.9)),
        "chain-nested": chain(chain(clip_released(1.0), DualAveraging()), Quadratic()),
    }
)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("mirror", MAPS.values(), ids=MAPS)
def test_direction_is_pure_and_fits_the_parameters(
    mirror: MirrorMap, dtype: torch.dtype, least_squares: MakePublic, released: Released, clock: Clock
) -> None:
    public = least_squares(dtype, batch_size=8)
    params, gradient = trainable(public.model), released(public)
    state = mirror.init(params=params, public=public)
    before = copies(params), copies(gradient), copies(list(state.values())), list(state)

    first, after = mirror.direction(gradient, state, Step(params=params, public=public, clock=clock, lr=0.1))
    again, _ = mirror.direction(gradient, state, Step(params=params, public=public, clock=clock, lr=0.1))

    assert equal(first, again)
    assert equal(params, before[0])
    assert equal(gradient, before[1])
    assert equal(list(state.values()), before[2])
    assert list(state) == before[3] == list(after)
    for d, p in zip(first, params, strict=True):
        assert (d.shape, d.dtype, d.device) == (p.shape, p.dtype, p.device)
        assert not d.requires_grad
        assert bool(d.isfinite().all())
    assert all(p.grad is None for p in params)


@pytest.mark.parametrize("mirror", MAPS.values(), ids=MAPS)
def test_persistent_state_is_all_that_a_checkpoint_needs(
    mirror: MirrorMap, least_squares: MakePublic, released: Released, clock: Clock
) -> None:
    public = least_squares()
    params, gradient = trainable(public.model), released(public)
    state = mirror.init(params=params, public=public)
    assert set(mirror.persistent) <= set(state)
    _, state = mirror.direction(gradient, state, Step(params=params, public=public, clock=clock, lr=0.1))
    saved = {name: state[name].clone() for name in mirror.persistent}
    resumed = mirror.init(params=params, public=public) | saved

    straight, _ = mirror.direction(gradient, state, Step(params=params, public=public, clock=clock, lr=0.2))
    restored, _ = mirror.direction(gradient, resumed, Step(params=params, public=public, clock=clock, lr=0.2))
    assert equal(straight, restored)


CURVATURE = 2.0
READABLE = {
    "euclidean",
    "first-order",
    "first-order-cosine",
    "fall-back",
    "clip",
    "chain",
    "chain-dual",
    "quadratic-cg",
}
READABLE |= {"bregman", "bregman-gradient-only", "bregman-spectral", "dual", "dual-spectral"}


class Numbers(nn.Module):
    def __init__(self, numbers: Tensor) -> None:
        super().__init__()
        self.numbers = nn.Parameter(numbers)

    def forward(self, batch: Tensor) -> Tensor:
        return batch + CURVATURE / 2 * self.numbers.square().sum()


def separable(numbers: Tensor) -> PublicLoss:
    """A public loss of CURVATURE / 2 times the sum of squares, as the audit has it beside a model."""
    return PublicLoss(Numbers(numbers), lambda model, batch: model(batch), torch.zeros(4, dtype=numbers.dtype))


@pytest.mark.parametrize(("name", "mirror"), MAPS.items(), ids=MAPS)
def test_a_map_says_what_its_direction_is_made_of_or_why_it_cannot(name: str, mirror: MirrorMap, clock: Clock) -> None:
    """Over two steps from 0, where a run of the audit starts; the audit inverts this formula."""
    theta, state, lr = torch.zeros(8, dtype=torch.float64), None, 0.1
    for seed in range(2):
        public = separable(theta)
        params, gradient = (
            trainable(public.model),
            [torch.randn(8, generator=torch.Generator().manual_seed(seed)).double()],
        )
        state = state or mirror.init(params=params, public=public)
        step = Step(params=params, public=public, clock=clock, lr=lr)
        mix = mixture_of(mirror, gradient, state, step, curvature=CURVATURE)
        direction, after = mirror.direction(gradient, state, step)
        if isinstance(mix, str):
            assert mix
            assert name not in READABLE
            return
        expected = mix.private * gradient[0] + mix.public * CURVATURE * theta
        torch.testing.assert_close(direction[0], expected, rtol=1e-8, atol=1e-8)
        if mix.elementwise:
            moved = gradient[0].clone()
            moved[0] += 1
            assert equal([mirror.direction([moved], state, step)[0][0][1:]], [direction[0][1:]])
        theta, state = theta - lr * direction[0], after


def test_a_map_that_lets_nothing_through_or_says_nothing_cannot_be_read(clock: Clock) -> None:
    public = separable(torch.zeros(8))
    step = Step(params=trainable(public.model), public=public, clock=clock, lr=0.1)
    for mirror, word in ((FirstOrder(0.0), "nothing through"), (Silent(), "no method `mixture`")):
        for one in (mirror, chain(clip_released(1.0), mirror)):
            why = mixture_of(one, [torch.ones(8)], one.init(params=step.params, public=public), step, curvature=1.0)
            assert isinstance(why, str)
            assert word in why


class Silent(Stateless):
    def direction(self, released: list[Tensor], state: State, step: Step) -> tuple[list[Tensor], State]:
        return released, state


@pytest.mark.parametrize("mirror", EXACT.values(), ids=EXACT)
def test_exact_maps_rest_at_the_optimum_when_nothing_is_released(
    mirror: MirrorMap, least_squares: MakePublic, clock: Clock
) -> None:
    public = least_squares()
    params = trainable(public.model)
    newton = torch.linalg.solve(public.hessian(), torch.cat([g.reshape(-1) for g in public.gradient()]))
    with torch.no_grad():
        for p, step in zip(params, newton.split([p.numel() for p in params]), strict=True):
            p -= step.reshape(p.shape)
    zero = [torch.zeros_like(p) for p in params]
    state = mirror.init(params=params, public=public)
    direction, _ = mirror.direction(zero, state, Step(params=params, public=public, clock=clock, lr=0.1))
    assert norm(direction) < 1e-8


@pytest.mark.parametrize("mirror", EXACT.values(), ids=EXACT)
def test_a_learning_rate_of_zero_is_harmless(
    mirror: MirrorMap, least_squares: MakePublic, released: Released, clock: Clock
) -> None:
    public = least_squares()
    params = trainable(public.model)
    state = mirror.init(params=params, public=public)
    direction, _ = mirror.direction(released(public), state, Step(params=params, public=public, clock=clock, lr=0.0))
    assert all(bool(d.isfinite().all()) for d in direction)
