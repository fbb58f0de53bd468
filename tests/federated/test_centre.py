"""Updates clipped around those of public users: the same mechanism, moved by a public constant."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import halfsilver as hs
from halfsilver._core.distributed import World
from halfsilver._core.tensors import flatten, trainable
from halfsilver.errors import ConfigError
from halfsilver.federated import Centre, Contribution, InProcess, LocalTraining, PublicUsers, Round, local_update
from halfsilver.federated.flower.client import Client
from halfsilver.mirror.users import pooled
from halfsilver.privacy.entropy import Entropy, OsEntropy, UnsafeSeed
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.users import Engine, UserUpdates
from halfsilver.privacy.users.engine import around
from tests.federated import flower_grid
from tests.federated.flower_grid import server_process
from tests.federated.helpers import LOCAL, Answers, columns, linear, loss_fn, plan, users
from tests.federated.test_core import trainer

_ = server_process  # a fixture


class Given:
    """An engine that subtracts the centre from updates that are given."""

    subtracts_centre = True

    def __init__(self, updates: Sequence[Sequence[Tensor]]) -> None:
        self.population, self._updates = len(updates), updates

    def contributions(self, round: Round) -> Iterator[Contribution]:
        for user in round.users.tolist():
            moved = zip(self._updates[user], round.centre or (), strict=True)
            yield Contribution([u - c for u, c in moved] if round.centre else self._updates[user])


def released(folder: Path, engine: Engine, p: hs.PrivacyPlan, centre: list[Tensor] | None, **more: Any) -> Tensor:
    entropy: Entropy = more.get("entropy", UnsafeSeed(5))
    made = UserUpdates(
        more.get("model") or linear(),
        loss_fn,
        engine,
        p,
        ledger=Ledger.open(folder / "ledger.jsonl", unit="user"),
        run_id="run",
        entropy=entropy,
        world=World(),
        step=lambda: 0,
        folder=folder / "attendance",
        centre=None if centre is None else lambda step: centre,
    )
    return flatten(made.release()).double()


def like(model: nn.Module, seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(p.shape, generator=generator) for p in trainable(model)]


def test_it_is_the_mechanism_of_moved_updates(tmp_path: Path) -> None:
    """Users at d_u around c, against users at d_u - c around zero, plus c: the same draws, noise and clips."""
    model, centre = linear(), like(linear(), 0)
    updates = [like(model, 1 + user) for user in range(20)]
    moved = [[u - c for u, c in zip(update, centre, strict=True)] for update in updates]
    p = plan(max_grad_norm=0.8)
    found = released(tmp_path / "a", Given(updates), p, centre)
    right = released(tmp_path / "b", Given(moved), p, None) + flatten(centre)
    assert float((found - right).abs().max()) < 1e-6
    assert float((found - released(tmp_path / "c", Given(updates), p, None)).norm()) > 0.1


def test_noise_is_the_plans(tmp_path: Path) -> None:
    """All users send the centre, so that only noise is left. n = 200,000, chi-square, alpha 1e-6; 2 % are rejected."""
    model = nn.Linear(200, 1000, bias=False)
    p = plan(noise_multiplier=1.3, max_grad_norm=0.7, expected_batch_size=50.0, sampling_rate=1.0)
    centre = like(model, 0, 10.0)
    out = released(tmp_path, Given([centre] * 50), p, centre, model=model, entropy=OsEntropy())
    noise = out - flatten(centre).double()
    for factor, accepted in ((1.0, True), (0.98, False), (1.02, False)):
        statistic = float(noise.square().sum()) / (1.3 * 0.7 / 50 * factor) ** 2
        tail = 2 * min(stats.chi2.cdf(statistic, len(noise)), stats.chi2.sf(statistic, len(noise)))
        assert bool(tail > 1e-6) is accepted


@given(size=st.sampled_from((0.0, 1e-9, 1.0, 1e9, float("inf"), float("nan"))), away=st.sampled_from((0.0, 1.0, 1e6)))
def test_a_user_moves_the_release_by_the_clip_norm_at_most(
    tmp_path_factory: pytest.TempPathFactory, size: float, away: float
) -> None:
    """With the same noise, a release with one more user differs by at most C / B, up to the float32 of its sum."""
    model, centre = linear(), like(linear(), 0, away)
    updates = [like(model, 1 + user) for user in range(10)]
    one = like(model, 99, size)
    p = plan(sampling_rate=1.0, max_grad_norm=0.8)
    empty: list[Tensor] = [torch.full_like(t, float("nan")) for t in one]  # contributes nothing
    ends = [
        released(tmp_path_factory.mktemp("run"), Given([*updates, last]), p, centre, entropy=UnsafeSeed(1))
        for last in (one, empty)
    ]
    rounding = 1e-6 * max(1.0, float(flatten(centre).norm()))
    assert float((ends[0] - ends[1]).norm()) <= 0.8 / 10 + rounding


def public_users(model: nn.Module, alike: bool) -> PublicUsers:
    """Users with the same rows; or pairs of users whose labels pull the bias of a zero model in opposite ways."""
    x = columns(8)[0]
    labels = [torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.int64), torch.full((8,), 2)]
    rows = [(x, labels[0]) for _ in range(4)] if alike else [(x, label) for label in labels]
    return PublicUsers(model, loss_fn, rows, LOCAL)


def test_alignment_against_its_definition() -> None:
    model = linear()
    rows = [columns(8, seed) for seed in range(5)]
    public = PublicUsers(model, loss_fn, rows, LocalTraining(lr=0.1, batch_size=8))
    each = torch.stack([flatten(local_update(model, loss_fn, r, LocalTraining(lr=0.1, batch_size=8))) for r in rows])
    each = each.double()
    pairs = torch.stack([each[i] @ each[j] for i in range(5) for j in range(5) if i != j]).mean()
    assert public.alignment() == pytest.approx(float((pairs / each.square().sum(1).mean()).sqrt()), rel=1e-4)
    assert public_users(model, alike=True).alignment() > 0.99


@pytest.mark.parametrize("alike", [True, False])
def test_it_is_on_only_where_public_users_agree(tmp_path: Path, caplog: pytest.LogCaptureFixture, alike: bool) -> None:
    ends = []
    for centre in (None, Centre()):
        model = nn.Linear(6, 3)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        made = trainer(model, plan(max_grad_norm=0.05), centre=centre, unsafe_seed=3)
        with caplog.at_level(logging.INFO, "halfsilver"):
            made.fit(InProcess(users(), LOCAL), public_users(model, alike), run_dir=tmp_path / repr(centre))
        ends.append(flatten(trainable(model)).detach())
    assert ("The centre is on" if alike else "The centre is off") in caplog.text
    assert torch.equal(*ends) is not alike
    assert "Centre(least=0.3)" in (tmp_path / "Centre(least=0.3)" / "config.json").read_text()


def test_an_update_keeps_its_dtype() -> None:
    """Else the fold would drop it, silently: to a node in bfloat16 the centre comes in float32."""
    update, centre = torch.ones(3, dtype=torch.bfloat16), torch.full((3,), 0.5)
    (moved,) = around([update], [centre])
    assert moved.dtype == torch.bfloat16
    assert moved.tolist() == [0.5] * 3
    assert around([update], None)[0] is update


def test_nodes_of_flower_receive_it(tmp_path: Path) -> None:
    """The same users, draws and noise on nodes and in this process: the same weights to 1e-6."""
    made = flower_grid.nodes(tmp_path, [5, 1, 14])
    one, two = (flower_grid.trainer(unsafe_seed=1, centre=Centre(least=0.0)) for _ in range(2))
    public = [columns(8, seed) for seed in range(30, 34)]
    server = flower_grid.strategy(
        made, tmp_path / "one", trainer=one, public=PublicUsers(one.model, loss_fn, public, LOCAL)
    )
    server.start(flower_grid.FakeGrid(made))
    assert not server.refused
    everybody = flower_grid.client(0, 20)().users
    two.fit(InProcess(everybody, LOCAL), PublicUsers(two.model, loss_fn, public, LOCAL), run_dir=tmp_path / "two")
    ours, theirs, start = (flatten(trainable(m)).detach() for m in (one.model, two.model, linear()))
    assert float((ours - theirs).abs().max()) < 1e-6 < float((ours - start).abs().max())


@pytest.mark.parametrize(
    "options", [{"centre": Centre(least=0.0)}, {"mirror": hs.FirstOrder(0.5)}], ids=["centre", "mirror"]
)
def test_public_updates_on_flower_are_those_of_the_shaped_model(tmp_path: Path, options: dict[str, Any]) -> None:
    """A geometry replaces a model that is a single layer; the same weights to 1e-6 as in this process."""
    made, public = flower_grid.nodes(tmp_path, [5, 1, 14]), [columns(8, seed) for seed in range(30, 34)]

    def shaped(own: Callable[[], Client]) -> Callable[[], Client]:
        return lambda: replace(own(), model=hs.Whitened().shape(linear(), loss_fn, pooled(public)).model)

    for node in made:
        node.client = shaped(node.client)
    one, two = (flower_grid.trainer(unsafe_seed=1, geometry=hs.Whitened(), **options) for _ in range(2))
    psi = PublicUsers(one.model, loss_fn, public, LOCAL)
    flower_grid.strategy(made, tmp_path / "one", trainer=one, public=psi).start(flower_grid.FakeGrid(made))
    everybody = flower_grid.client(0, 20)().users
    two.fit(InProcess(everybody, LOCAL), PublicUsers(two.model, loss_fn, public, LOCAL), run_dir=tmp_path / "two")
    ours, theirs = (flatten(trainable(t.model)).detach() for t in (one, two))
    assert float((ours - theirs).abs().max()) < 1e-6


def test_what_cannot_be_centred_is_refused(tmp_path: Path) -> None:
    model = linear()
    public = public_users(model, alike=True)
    with pytest.raises(ConfigError, match="subtracts the centre"):
        trainer(model, plan(), centre=Centre()).fit(Answers(20, lambda u, r: None), public, run_dir=tmp_path / "a")
    with pytest.raises(ConfigError, match="two public users"):
        trainer(model, plan(), centre=Centre()).fit(InProcess(users(), LOCAL), columns(8), run_dir=tmp_path / "b")
    central = plan(unit="example")
    with pytest.raises(ConfigError, match="behind an engine"):
        trainer(model, central, centre=Centre()).fit(columns(20), columns(8, 1), run_dir=tmp_path / "c")
    with pytest.raises(ConfigError, match=r"least=1\.5"):
        Centre(least=1.5)
