from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import halfsilver as hs
from halfsilver._core.tensors import norm, trainable
from halfsilver.errors import ConfigError
from halfsilver.mirror import (
    Clock,
    DualAveraging,
    Euclidean,
    FirstOrder,
    PublicLoss,
    Stateless,
    Step,
    chain,
    clip_released,
    constant,
    cosine,
)
from halfsilver.mirror.base import as_map

MakePublic = Callable[..., PublicLoss]
Released = Callable[[PublicLoss], list[Tensor]]
START = Clock(step=0, total_steps=10)


class Untouchable:
    """Stands in for a PublicLoss that nobody may ask for anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the public loss was asked for {name}")


class Recorder:
    """Stands in for a PublicLoss with a fixed gradient, and writes down the steps it is asked for."""

    def __init__(self, *gradient: float) -> None:
        self.value, self.steps = torch.tensor(gradient), list[int | None]()

    def gradient(self, params: list[Tensor], *, step: int | None = None) -> list[Tensor]:
        self.steps.append(step)
        return [self.value]


def apply(mirror: Any, released: list[Tensor], public: Any, clock: Clock = START) -> list[Tensor]:
    params = [torch.zeros_like(r) for r in released]
    state = mirror.init(params=params, public=public)
    return list(mirror.direction(released, state, Step(params=params, public=public, clock=clock, lr=0.1))[0])


def test_euclidean_returns_what_was_released() -> None:
    released = [torch.tensor([1.0, 2.0])]
    assert apply(Euclidean(), released, Untouchable())[0] is released[0]


@pytest.mark.parametrize("alpha", [1, 1.0, constant(1.0), cosine(end=1.0)], ids=repr)
@pytest.mark.parametrize("public", [Untouchable(), None], ids=["raises", "none"])
def test_first_order_at_one_never_asks_for_the_public_gradient(alpha: Any, public: Any) -> None:
    released = [torch.tensor([1.0, -2.0])]
    assert apply(FirstOrder(alpha), released, public)[0] is released[0]


def test_a_schedule_does_not_ask_while_it_is_at_one() -> None:
    public = Recorder(1.0, 1.0)
    mirror, released = FirstOrder(cosine(end=0.5)), [torch.tensor([1.0, -2.0])]
    apply(mirror, released, public, Clock(step=0, total_steps=4))
    assert public.steps == []
    apply(mirror, released, public, Clock(step=2, total_steps=4))
    assert public.steps == [2]


def test_first_order_by_hand() -> None:
    # 0.25 * (4, -8) + 0.75 * (2, 4) = (1, -2) + (1.5, 3)
    (direction,) = apply(FirstOrder(0.25), [torch.tensor([4.0, -8.0])], Recorder(2.0, 4.0))
    assert direction.tolist() == [2.5, 1.0]


def test_first_order_clips_only_the_public_gradient() -> None:
    # (3, 4) has norm 5 and becomes (0.6, 0.8); half of each
    mirror = FirstOrder(0.5, public_max_norm=1.0)
    (direction,) = apply(mirror, [torch.tensor([10.0, 0.0])], Recorder(3.0, 4.0))
    assert direction.tolist() == pytest.approx([5.3, 0.4])


def test_first_order_uses_the_public_batch_of_its_step(least_squares: MakePublic, released: Released) -> None:
    public = least_squares(batch_size=4)
    params, gradient = trainable(public.model), released(public)
    for step in (0, 1, 5):
        clock = Clock(step=step, total_steps=9)
        got, _ = FirstOrder(0.5).direction(gradient, {}, Step(params=params, public=public, clock=clock, lr=1.0))
        expected = [0.5 * r + 0.5 * g for r, g in zip(gradient, public.gradient(step=step), strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("alpha", [0.5, 0.0, cosine(end=0.9), constant(0.9)], ids=repr)
def test_first_order_below_one_needs_public_data_before_the_first_step(alpha: Any) -> None:
    with pytest.raises(ConfigError, match="FirstOrder needs public data"):
        FirstOrder(alpha).init(params=[], public=None)
    with pytest.raises(ConfigError, match="FirstOrder needs public data"):
        FirstOrder(alpha).direction([], {}, Step(params=[], public=None, clock=Clock(step=9, total_steps=10), lr=1.0))


def test_bad_options_are_refused() -> None:
    for make in (
        lambda: FirstOrder(1.5),
        lambda: FirstOrder(0.5, public_max_norm=0.0),
        lambda: clip_released(0.0),
    ):
        with pytest.raises(ConfigError):
            make()


def test_clip_released_scales_only_what_is_too_long() -> None:
    long, short = [torch.tensor([3.0]), torch.tensor([[4.0]])], [torch.tensor([0.3]), torch.tensor([[0.4]])]
    clipped = apply(clip_released(1.0), long, None)
    assert norm(clipped) == pytest.approx(1.0)
    assert clipped[0].item() / clipped[1].item() == pytest.approx(0.75)
    assert all(a is b for a, b in zip(apply(clip_released(1.0), short, None), short, strict=True))
    assert apply(clip_released(1.0), [torch.zeros(2)], None)[0].tolist() == [0.0, 0.0]


def test_chain_passes_each_output_on_in_order() -> None:
    released = [torch.tensor([6.0, 8.0])]
    clip_first = apply(chain(clip_released(1.0), FirstOrder(0.5)), released, Recorder(2.0, 2.0))
    clip_last = apply(chain(FirstOrder(0.5), clip_released(1.0)), released, Recorder(2.0, 2.0))
    assert clip_first[0].tolist() == pytest.approx([1.3, 1.4])
    assert norm(clip_last) == pytest.approx(1.0)
    assert apply(chain(), released, None)[0] is released[0]


def test_chain_keeps_the_states_apart(least_squares: MakePublic, released: Released, clock: Clock) -> None:
    public = least_squares()
    params, gradient = trainable(public.model), released(public)
    mirror = chain(DualAveraging(), chain(Euclidean(), DualAveraging(damping=2.0)))
    assert mirror.persistent == ("0.dual", "1.1.dual")
    state = mirror.init(params=params, public=public)
    _, state = mirror.direction(gradient, state, Step(params=params, public=public, clock=clock, lr=0.5))
    flat = torch.cat([g.reshape(-1) for g in gradient])
    assert torch.allclose(state["0.dual"], 0.5 * flat)
    assert not torch.allclose(state["0.dual"], state["1.1.dual"])


# ---- the signature of version 0.1


@dataclass(frozen=True)
class Halved:
    """A map as docs/extend.md of version 0.1 had it."""

    persistent: ClassVar[tuple[str, ...]] = ("count",)

    def init(self, *, params: Any, public: Any) -> Any:
        return {"count": torch.zeros(())}

    def direction(self, released: Any, state: Any, *, params: Any, public: Any, clock: Any, lr: Any) -> Any:
        assert (params, public, clock.step, lr) == ([], None, 3, 0.1)
        return [g / 2 for g in released], {"count": state["count"] + 1}


class Loose(Stateless):
    def direction(self, released: Any, state: Any, **options: Any) -> Any:
        return [options["lr"] * g for g in released], state


class Wrong(Stateless):
    def direction(self, released: Any) -> Any:
        return released


STEP = Step(params=[], public=None, clock=Clock(step=3, total_steps=10), lr=0.1)


def test_a_map_of_version_0_1_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"Halved\.direction.*direction\(self, released, state, step\)"):
        mirror = as_map(Halved())
    state = mirror.init(params=[], public=None)
    direction, state = mirror.direction([torch.tensor(4.0)], state, STEP)
    assert (float(direction[0]), float(state["count"])) == (2.0, 1.0)
    assert mirror.persistent == ("count",)
    assert repr(mirror) == "Halved()"  # the run folder's word for it
    assert as_map(mirror) is mirror
    with pytest.warns(DeprecationWarning, match="Loose"):
        assert float(as_map(Loose()).direction([torch.tensor(2.0)], {}, STEP)[0][0]) == pytest.approx(0.2)


def test_wherever_the_library_takes_a_map_it_takes_one_of_version_0_1() -> None:
    earlier: Any = Halved()
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = hs.PrivacyPlan(steps=2, sampling_rate=0.5, expected_batch_size=2, noise_multiplier=1.0)
    with pytest.warns(DeprecationWarning, match="Halved") as warned:
        trainer = hs.Trainer(model, lambda model, batch: model(batch), optimizer=sgd, plan=plan, mirror=earlier)
    assert warned[0].filename == __file__
    assert replace(trainer, plan=plan).mirror is trainer.mirror  # warns once
    with pytest.warns(DeprecationWarning, match="Halved") as warned:
        both = chain(Euclidean(), earlier)
    assert warned[0].filename == __file__
    direction, _ = both.direction([torch.tensor(4.0)], both.init(params=[], public=None), STEP)
    assert float(direction[0]) == 2.0


def test_a_map_that_can_be_called_neither_way_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Wrong\.direction\(released, state, step\)"):
        as_map(Wrong())


def test_maps_of_today_are_taken_as_they_are() -> None:
    for mirror in (Euclidean(), FirstOrder(0.5), chain(Euclidean())):
        assert as_map(mirror) is mirror
