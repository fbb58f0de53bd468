"""FallBack: its score, its error rates, its bounds, and whether it helps where it should."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import halfsilver as hs
from halfsilver._core.tensors import norm
from halfsilver.errors import ConfigError
from halfsilver.mirror import Clock, FallBack, FirstOrder, Step

START = Clock(step=0, total_steps=10)
State = dict[str, Tensor]
Floats = npt.NDArray[np.float64]


class Fixed:
    """Stands in for a PublicLoss whose gradient is given."""

    def __init__(self, *gradient: Tensor) -> None:
        self.value = list(gradient)

    def gradient(self, params: list[Tensor], *, step: int | None = None) -> list[Tensor]:
        return self.value


def step(
    mirror: Any, released: list[Tensor], public: Any, state: State | None = None, clock: Clock = START
) -> tuple[list[Tensor], State]:
    params = [torch.zeros_like(r) for r in released]
    state = mirror.init(params=params, public=public) if state is None else state
    direction, state = mirror.direction(released, state, Step(params=params, public=public, clock=clock, lr=0.1))
    return direction, state


def trust(state: State) -> float:
    return float(state["evidence"][2])


def normal(generator: torch.Generator, length: int = 4) -> Tensor:
    return torch.randn(length, generator=generator, dtype=torch.float64)


# ---- what is computed


def test_evidence_and_direction_by_an_independent_calculation() -> None:
    """Sums written out over all steps, with weights (1 - 1/memory)^age; the map keeps them by recursion."""
    rng, alpha, sigmas, memory = np.random.default_rng(0), 0.7, 1.0, 4.0
    mirror, state = FallBack(FirstOrder(alpha), sigmas=sigmas, memory=memory), None
    projections, trusts = list[float](), list[float]()
    for _ in range(40):
        p, r = rng.normal(size=(2, 30)) * 3
        r -= 0.3 * p
        projections.append(r @ p / np.linalg.norm(p))
        direction, state = step(mirror, [torch.tensor(r[:20]), torch.tensor(r[20:])],
                                Fixed(torch.tensor(p[:20]), torch.tensor(p[20:])), state)  # fmt: skip
        weights = (1 - 1 / memory) ** np.arange(len(projections))[::-1]
        total, squares = np.sum(weights * projections), np.sum((weights * projections) ** 2)
        expected = min([*trusts, float(np.clip(2 + total / np.sqrt(squares) / sigmas, 0, 1))])
        assert state["evidence"].tolist() == pytest.approx([total, squares, expected], rel=1e-9)
        raised = alpha + (1 - expected) * (1 - alpha)
        assert torch.cat(direction).numpy() == pytest.approx(raised * r + (1 - raised) * p, rel=1e-9)
        trusts.append(expected)
    assert min(trusts) == 0
    assert max(trusts) == 1
    assert any(0 < t < 1 for t in trusts)


def test_while_it_trusts_the_public_data_it_is_the_mirror_bit_for_bit() -> None:
    generator, state = torch.Generator().manual_seed(0), None
    mirror = FirstOrder(hs.cosine(end=0.3), public_max_norm=2.0)
    for number in range(20):
        p, clock = normal(generator), Clock(step=number, total_steps=20)
        released = [normal(generator) + 0.5 * p]
        plain, _ = step(mirror, released, Fixed(p), clock=clock)
        guarded, state = step(FallBack(mirror), released, Fixed(p), state, clock)
        assert trust(state) == 1.0
        assert torch.equal(plain[0], guarded[0])


def test_alpha_is_never_below_the_schedule_nor_above_one() -> None:
    generator, schedule, trusts = torch.Generator().manual_seed(2), hs.cosine(end=0.2), []
    mirror, state = FallBack(FirstOrder(schedule), sigmas=0.5, memory=5), None
    for number in range(300):
        released, p, clock = normal(generator), normal(generator), Clock(step=number, total_steps=300)
        (direction,), state = step(mirror, [released], Fixed(p), state, clock)
        alpha = float((direction - p) @ (released - p) / (released - p).square().sum())
        assert schedule(clock) - 1e-9 <= alpha <= 1 + 1e-9
        trusts.append(trust(state))
    assert min(trusts) == 0
    assert max(trusts) == 1


def test_a_steady_opponent_ends_in_plain_dp_sgd_for_good() -> None:
    mirror, p, state = FallBack(FirstOrder(0.5), memory=100), torch.tensor([1.0, 0.0]), None
    for _ in range(64):  # 2 * sigmas = 8, squared
        (direction,), state = step(mirror, [torch.tensor([-1.0, 3.0])], Fixed(p), state)
    assert trust(state or {}) < 0.05
    for _ in range(8):
        (direction,), state = step(mirror, [torch.tensor([-1.0, 3.0])], Fixed(p), state)
    assert trust(state or {}) == 0
    assert direction.tolist() == pytest.approx([-1.0, 3.0])
    for _ in range(200):
        (direction,), state = step(mirror, [torch.tensor([1.0, 3.0])], Fixed(p), state)
    assert direction.tolist() == pytest.approx([1.0, 3.0])


# ---- how often it errs


def scores(mean: float, sequences: int, steps: int = 20, memory: float = 10.0) -> Floats:
    """Scores after that many projections of unit variance, through the map; the scale of the release is odd."""
    rng = np.random.default_rng(3)
    mirror, public = FallBack(FirstOrder(0.5), sigmas=1.0, memory=memory), Fixed(torch.tensor([0.0, 7.0]))
    found = []
    for _ in range(sequences):
        state = None
        for projection in torch.tensor(1e-3 * rng.normal(mean, size=(steps, 1)), dtype=torch.float64):
            _, state = step(mirror, [torch.cat([projection + 1, projection])], public, state)
        total, squares, _ = (state or {})["evidence"].tolist()
        found.append(total / math.sqrt(squares))
    return np.array(found)


def in_scale(found: Floats) -> bool:
    """Whether the mean square is 1, as it is exactly without agreement; its spread is below that of a chi-square."""
    return bool(abs(np.mean(found**2) - 1) < 3.9 * math.sqrt(2 / len(found)))


@pytest.mark.nightly
def test_false_alarms_come_at_the_stated_rate() -> None:
    """n = 1,000 sequences without agreement, alpha = 1e-4; scores that are a fifth off are told from right ones."""
    found = scores(0.0, 1000)
    assert in_scale(found)
    assert not in_scale(1.2 * found)
    assert not in_scale(0.8 * found)
    for z, rate in ((1.0, 0.1587), (1.5, 0.0668), (2.0, 0.0228)):
        count = int(np.sum(found < -z))
        assert count < 1000 * math.exp(-(z**2) / 2), "the bound"
        assert count < 1000 * 1.3 * rate + 3.9 * math.sqrt(1000 * rate), "nearly normal"


def test_power() -> None:
    """n = 100: where projections lie three quarters of a standard deviation below 0, a hundred of them tell."""
    assert np.mean(scores(-0.75, 100, steps=100, memory=100.0) < -4) >= 0.95


# ---- odd cases


def test_where_the_schedule_is_at_one_nobody_asks_for_the_public_gradient() -> None:
    released = [torch.tensor([3.0, 4.0])]
    (direction,), state = step(FallBack(FirstOrder(1.0)), released, None)
    assert direction is released[0]
    assert state["evidence"].tolist() == [0, 0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_public_gradient_that_is_not_finite_is_not_used(bad: float) -> None:
    released = [torch.tensor([3.0, 4.0])]
    (direction,), state = step(FallBack(FirstOrder(0.5)), released, Fixed(torch.tensor([1.0, bad])))
    assert direction is released[0]
    assert state["evidence"].tolist() == [0, 0, 1]


def test_zeros_are_harmless() -> None:
    zero = torch.zeros(3)
    (direction,), state = step(FallBack(FirstOrder(0.5)), [zero], Fixed(zero))
    assert norm([direction]) == 0
    assert trust(state) == 1.0


@pytest.mark.parametrize("options", [{"sigmas": 0.0}, {"memory": 32.0}, {"memory": math.nan}], ids=str)
def test_bad_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        FallBack(FirstOrder(0.5), **options)


def test_public_data_are_asked_for_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match="FirstOrder needs public data"):
        FallBack(FirstOrder(0.5)).init(params=[], public=None)


# ---- in training


def squared(model: Any, batch: Any) -> Tensor:
    return torch.nn.functional.mse_loss(model(batch[0])[:, 0], batch[1], reduction="none")


def rows(seed: int, count: int, sign: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    noise = 0.3 * torch.randn(count, generator=generator)
    return x, sign * (x @ torch.tensor([1.0, -1.0, 0.5, 0.0])) + noise


PLAN = hs.PrivacyPlan(steps=150, sampling_rate=0.05, expected_batch_size=100, noise_multiplier=2.0, max_grad_norm=4.0)
CLIP, FIRST_ORDER = hs.clip_released(4.0), FirstOrder(hs.cosine(end=0.4))
MIRROR, GUARD = hs.chain(CLIP, FIRST_ORDER), hs.chain(CLIP, FallBack(FIRST_ORDER, sigmas=3.0, memory=30))


def trained(run: Path, mirror: Any, sign: float) -> tuple[float, hs.Trainer]:
    """Loss on fresh rows after a run whose public labels are right (`sign` 1) or turned round (-1)."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = hs.Trainer(model, squared, optimizer=sgd, plan=PLAN, mirror=mirror, unsafe_seed=0, progress=False)
    trainer.fit(rows(1, 2000), rows(2, 4000, sign), run_dir=run)
    return trainer.evaluate(rows(3, 2000))["loss"], trainer


def kept(trainer: hs.Trainer) -> Tensor:
    return trainer.state_dict()[0]["mirror.1.evidence"]


@pytest.mark.nightly
def test_labels_turned_round_cost_little_right_ones_are_used_and_a_checkpoint_keeps_the_evidence(
    tmp_path: Path,
) -> None:
    warm, _ = trained(tmp_path / "warm", CLIP, 1.0)
    bad, _ = trained(tmp_path / "bad", MIRROR, -1.0)
    guarded, first = trained(tmp_path / "guarded", GUARD, -1.0)
    assert bad > 3 * warm
    assert guarded < 1.1 * warm
    assert kept(first)[2] < 0.5
    _, again = trained(tmp_path / "guarded", GUARD, -1.0)  # finds the finished run, and only loads it
    assert torch.equal(kept(again), kept(first))
    honest, _ = trained(tmp_path / "honest", MIRROR, 1.0)
    same, trainer = trained(tmp_path / "same", GUARD, 1.0)
    assert kept(trainer)[2] == 1.0
    assert same == honest
