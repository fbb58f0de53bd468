"""The Flower engine in one process: who is asked, and that it is the core that trains."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message
from torch import Tensor

import halfsilver as hs
from halfsilver._core.tensors import Tensors, flatten, norm, trainable
from halfsilver.errors import ConfigError
from halfsilver.federated import InProcess, PublicUsers
from halfsilver.federated.flower import (
    Ahead,
    Client,
    Enrolment,
    Member,
    fingerprint,
    make_client_app,
)
from halfsilver.federated.flower.keys import private_key
from halfsilver.federated.flower.wire import from_record, to_record
from halfsilver.mirror import PublicLoss
from halfsilver.privacy.strategies import Buffered
from halfsilver.runs.verify import verify
from tests.federated.flower_grid import (
    FAST,
    FakeGrid,
    Node,
    asked,
    client,
    enrolled,
    nodes,
    server_process,
    strategy,
    total,
    trainer,
)
from tests.federated.helpers import LOCAL, columns, linear, loss_fn, plan

_ = server_process  # a fixture


# ---- the same as the core


@pytest.mark.parametrize("sizes", [[1] * 20, [5, 1, 14], [20]], ids=["device", "mixed", "silo"])
def test_nodes_bring_what_the_core_would(tmp_path: Path, sizes: list[int]) -> None:
    """The sum of a round over devices and silos is that of the same users in one process; also when all is drawn."""
    made = nodes(tmp_path, sizes)
    engine = strategy(made, tmp_path)
    engine.grid = FakeGrid(made)
    here = InProcess(client(0, 20)().users, LOCAL)
    for users in ([0, 3, 4, 5, 6, 19], list(range(20)), []):
        expected = total(here, asked(users))
        assert float((total(engine, asked(users)) - expected).abs().max()) < 1e-6
        assert users == [] or norm([expected]) > 0.1
    assert engine.population == here.population == 20
    assert not engine.refused


def test_start_trains_as_the_trainer_does_in_process(tmp_path: Path) -> None:
    """Same seed, so the same users and noise: the same weights to 1e-6, through messages or without."""
    made = nodes(tmp_path, [5, 1, 14])
    one, two = (trainer(unsafe_seed=1, mirror=hs.FirstOrder(0.6)) for _ in range(2))
    public = columns(16, seed=1)
    flower = strategy(made, tmp_path, trainer=one, public=public)
    grid = FakeGrid(made)
    result = flower.start(grid)
    two.fit(InProcess(client(0, 20)().users, LOCAL), public, run_dir=tmp_path / "two")
    ours, theirs = (flatten(trainable(t.model)).detach() for t in (one, two))
    assert float((ours - theirs).abs().max()) < 1e-6
    assert float((ours - flatten(trainable(linear())).detach()).abs().max()) > 0.1
    sent = from_record(result.arrays, trainable(one.model))
    assert sent is not None
    assert torch.equal(flatten(sent), ours)
    assert flower.result is not None
    assert flower.result.updates == 5
    assert not flower.refused
    assert len({m.metadata.dst_node_id for m in grid.sent}) == 3


def test_nodes_in_a_geometry_hold_its_factors(tmp_path: Path) -> None:
    """They train V: as in process, to 1e-6. Without the factors they refuse, and the server refuses to change them."""
    made, public = nodes(tmp_path, [5, 1, 14]), columns(16, seed=1)
    plain = [node.client for node in made]

    def shaped(own: Callable[[], Client]) -> Callable[[], Client]:
        return lambda: replace(own(), model=hs.Whitened().shape(linear(), loss_fn, public).model)

    one, two = (trainer(unsafe_seed=1, geometry=hs.Whitened()) for _ in range(2))
    for node, own in zip(made, plain, strict=True):
        node.client = shaped(own)
    flower = strategy(made, tmp_path / "one", trainer=one, public=public)
    flower.start(FakeGrid(made))
    two.fit(InProcess(client(0, 20)().users, LOCAL), public, run_dir=tmp_path / "two")
    ours, theirs = (flatten(trainable(t.model)).detach() for t in (one, two))
    assert not flower.refused
    assert float((ours - theirs).abs().max()) < 1e-6
    changing = trainer(unsafe_seed=1, geometry=hs.Whitened(refresh=2))
    with pytest.raises(ConfigError, match="refresh"):
        strategy(made, tmp_path / "three", trainer=changing, public=public).start(FakeGrid(made))
    for node, own in zip(made, plain, strict=True):
        node.client = own
    with pytest.raises(ConfigError, match="the same model"):
        strategy(made, tmp_path / "four", trainer=trainer(geometry=hs.Whitened()), public=public).start(FakeGrid(made))


@pytest.mark.nightly
def test_a_link_that_dies_costs_one_step_and_the_run_goes_on(tmp_path: Path) -> None:
    made, p = nodes(tmp_path, [1] * 20), plan(steps=6, spare_steps=1, sampling_rate=0.9)
    grid = FakeGrid(made)
    grid.breaks_at = 50
    first = strategy(made, tmp_path, trainer=trainer(plan=p, checkpoint_seconds=0.0))
    with pytest.raises(ConnectionError):
        first.start(grid)
    second = strategy(made, tmp_path, trainer=trainer(plan=p, checkpoint_seconds=0.0))
    second.start(FakeGrid(made))
    assert second.result is not None
    assert second.result.updates == 6
    assert json.loads((tmp_path / "run" / "statement.json").read_text())["spent_so_far"]["steps"] == 7
    assert verify(tmp_path / "run")["finished"]


def test_with_correlated_noise_no_node_is_asked_or_heard_too_early(tmp_path: Path) -> None:
    """20 nodes of which some are away, one that sends each of its replies again in every later round, and a link that
    dies. Rounds are counted by the ledger; the separation is 4.
    """
    noise = hs.Correlated(separation=4, strategy=Buffered((0.9,), (0.3,)))
    p = plan(steps=12, spare_steps=1, sampling_rate=0.25, expected_batch_size=5.0, noise=noise)
    ledger, sent, when = tmp_path / "run" / "ledger.jsonl", list[Message](), dict[int, list[int]]()

    def noted(node: Node, message: Message) -> Sequence[Message]:
        when.setdefault(node.node_id, []).append(ledger.read_text().count('"intent"'))
        reply = node.honest(message)
        if node.node_id != 100:
            return [reply]
        sent.append(reply)
        return [*sent, reply]

    made = nodes(tmp_path, [1] * 20)
    for node in made:
        node.reply, node.online = noted, node.node_id % 7 != 3
    grid = FakeGrid(made)
    grid.breaks_at = 23
    with pytest.raises(ConnectionError):
        strategy(made, tmp_path, trainer=trainer(plan=p, checkpoint_seconds=0.0)).start(grid)
    second = strategy(made, tmp_path, trainer=trainer(plan=p, checkpoint_seconds=0.0))
    second.start(FakeGrid(made))
    assert second.result is not None
    assert second.result.updates == 12
    assert min(later - earlier for seen in when.values() for earlier, later in pairwise(seen)) >= 4
    assert {node.node_id for node in made if not node.online}.isdisjoint(when)
    assert sum(map(len, when.values())) > 40
    assert sum(second.refused.values()) > 0
    assert verify(tmp_path / "run")["statement"]["sampler"] == "separated"
    for others in (made[1:], [made[1], made[0], *made[2:]]):
        with pytest.raises(ConfigError, match="members"):
            strategy(others, tmp_path, trainer=trainer(plan=p)).start(FakeGrid(made))


def test_arguments_of_start_that_contradict_the_trainer_are_refused(tmp_path: Path) -> None:
    made = nodes(tmp_path, [20])
    grid = FakeGrid(made)
    with pytest.raises(ConfigError, match="num_rounds=3"):
        strategy(made, tmp_path).start(grid, num_rounds=3)
    with pytest.raises(ConfigError, match="timeout"):
        strategy(made, tmp_path).start(grid, timeout=3.0)
    with pytest.raises(ConfigError, match="initial_arrays"):
        strategy(made, tmp_path).start(grid, initial_arrays=to_record([torch.zeros(3)]))
    with pytest.raises(ConfigError, match="round 1"):
        strategy(made, tmp_path).configure_train(1, to_record([]), ConfigRecord(), grid)
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_begin_without_nodes(tmp_path: Path) -> None:
    made = nodes(tmp_path, [10, 10])
    made[0].online = False
    with pytest.raises(ConfigError, match="min_online=2"):
        strategy(made, tmp_path, settings=replace(FAST, min_online=2)).start(FakeGrid(made))
    assert not (tmp_path / "run").exists()


# ---- who is asked


def test_only_enrolled_nodes_are_asked_and_only_for_their_own(tmp_path: Path) -> None:
    made = nodes(tmp_path, [3, 3, 3, 3])
    members = [n.member for n in made[:3]]
    members[1] = replace(members[1], revoked=True)
    engine = strategy(made, tmp_path, enrolment=Enrolment(tuple(members)))
    engine.grid = grid = FakeGrid(made)
    made[2].online = False
    list(engine.contributions(asked(list(range(9)))))
    assert [m.metadata.dst_node_id for m in grid.sent] == [100]
    assert grid.sent[0].content["task"]["users"] == [0, 1, 2]
    made[2].online = True
    list(engine.contributions(asked([2, 3, 8])))
    assert [m.content["task"]["users"] for m in grid.sent[1:]] == [[2], [2]]
    assert engine.population == 9


# ---- the public gradient


class Slow(PublicLoss):
    """Tells on which thread it was asked."""

    def __init__(self) -> None:
        super().__init__(linear(), loss_fn, columns(8, seed=1))
        self.threads: list[str] = []

    def gradient(self, params: Tensors | None = None, *, step: int | None = None) -> Tensors:
        self.threads.append(threading.current_thread().name)
        return super().gradient(params, step=step)


def test_a_public_gradient_that_nobody_asks_for_does_not_undo_the_update(tmp_path: Path) -> None:
    """Public users train on the model itself; alpha 1 never asks for them, and they are slower than the nodes."""

    def slow(model: Any, batch: Any) -> Tensor:
        time.sleep(0.05)
        return loss_fn(model, batch)

    made = nodes(tmp_path, [20])
    ends = []
    for name in ("with", "without"):
        t = trainer(plan=plan(steps=1), unsafe_seed=1)
        public = PublicUsers(t.model, slow, [columns(8)], LOCAL) if name == "with" else None
        strategy(made, tmp_path / name, trainer=t, public=public).start(FakeGrid(made))
        ends.append(flatten(trainable(t.model)).detach())
    assert torch.equal(ends[0], ends[1])


def test_the_public_gradient_is_begun_while_nodes_train_and_used_once() -> None:
    inner = Slow()
    ahead = Ahead(inner)
    ahead.begin(4)
    live = trainable(inner.model)
    first, second = ahead.gradient(live, step=4), ahead.gradient(live, step=4)
    assert torch.equal(flatten(first), flatten(second))
    assert [name.startswith("public-gradient") for name in inner.threads] == [True, False]
    ahead.begin(5)
    elsewhere = [p + 1 for p in live]
    assert not torch.equal(flatten(ahead.gradient(elsewhere, step=5)), flatten(first))
    assert inner.threads[-1] == "MainThread"
    assert ahead.value() == inner.value()


# ---- enrolment, keys, the client app


def test_an_enrolment_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = enrolled(nodes(tmp_path, [2, 1]))
    made.save(tmp_path / "members.json")
    assert Enrolment.load(tmp_path / "members.json") == made
    assert made.by_member([0, 1, 2]) == {made.members[0]: [0, 1], made.members[1]: [0]}
    for text in ("[]", '{"members": [{"name": "a"}]}', "{", '{"members": [{"nam": 1, "fingerprint": "0"}]}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.json"):
            Enrolment.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "members",
    [
        (),
        (Member(name="a", fingerprint="0" * 64), Member(name="b", fingerprint="0" * 64)),
        (Member(name="a", fingerprint="0" * 64), Member(name="a", fingerprint="1" * 64)),
    ],
)
def test_an_enrolment_names_every_node_once(members: tuple[Member, ...]) -> None:
    with pytest.raises(ConfigError):
        Enrolment(members)


@pytest.mark.parametrize("change", [{"fingerprint": "0" * 63}, {"fingerprint": "A" * 64}, {"users": 0}, {"revoked": 1}])
def test_a_member_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Member(**({"name": "a", "fingerprint": "0" * 64} | change))


def test_a_fingerprint_is_of_the_key_and_not_of_its_file(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    node = nodes(tmp_path, [1])[0]
    key = private_key(node.key_file).public_key()
    ssh = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    assert fingerprint(node.public) == fingerprint(ssh + b" somebody@somewhere\n")


def test_the_app_says_that_it_failed_and_not_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = nodes(tmp_path, [20])
    engine = strategy(made, tmp_path)
    engine.grid = grid = FakeGrid(made)
    list(engine.contributions(asked([1])))

    def setup(context: Any) -> Client:
        raise ValueError("row 17 of Mrs Smith")

    with pytest.raises(RuntimeError, match="could not answer") as caught:
        make_client_app(setup)(grid.sent[0], made[0].context())
    assert "Smith" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "Smith" in caplog.text
    reply = make_client_app(lambda context: client(0, 20)())(grid.sent[0], made[0].context())
    assert set(reply.content) == {"update", "proof"}


def test_a_node_with_another_frozen_part_does_not_answer(tmp_path: Path) -> None:
    made = nodes(tmp_path, [20])
    engine = strategy(made, tmp_path)
    engine.grid = grid = FakeGrid(made)
    list(engine.contributions(asked([1])))
    odd = client(0, 20)()
    odd.model.register_buffer("shift", torch.ones(3))
    with pytest.raises(RuntimeError):
        make_client_app(lambda context: odd)(grid.sent[0], made[0].context())


def test_halfsilver_does_not_import_flower_and_names_the_extra_that_has_it() -> None:
    code = """
        import sys, halfsilver, halfsilver.federated
        assert "flwr" not in sys.modules
        sys.modules["flwr"] = None
        import halfsilver.federated.flower"""
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "MissingExtra" in done.stderr
    assert "pip install 'halfsilver[flower]'" in done.stderr
