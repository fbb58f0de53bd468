"""Bad, slow and vanishing nodes: 20 clients, 6 of them faulty, 50 rounds. Nothing stops, nobody has too much say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from torch import Tensor

import halfsilver as hs
from halfsilver._core.tensors import flatten, norm, trainable
from halfsilver.federated.flower import Client, MirrorStrategy, Settings
from halfsilver.federated.flower.wire import to_record
from halfsilver.privacy.entropy import UnsafeSeed
from tests.federated.flower_grid import FakeGrid, Node, Reply, client, enrolled, server_process, signed_by
from tests.federated.helpers import linear, loss_fn, plan, source

SETTINGS = Settings(poll_seconds=0.002, round_seconds=1.0, patience_seconds=0.0)
EXPECTED, ROUNDS = 20.0, 50
_ = server_process  # a fixture


def sends(make: Callable[[Tensor], Tensor]) -> Reply:
    """A signed reply with these numbers in place of an update."""
    return lambda node, message: [signed_by(node, message, to_record([make(p) for p in linear().parameters()]))]


def crashes(node: Node, message: Message) -> Sequence[Message]:
    raise ArithmeticError("this node crashes")


def hangs_or_crashes(node: Node, message: Message) -> Sequence[Message]:
    """A hanging node costs each round its whole time, so this one hangs in every tenth."""
    return [] if len(node.seen) % 10 == 0 else crashes(node, message)


FAULTS: dict[str, Reply] = {
    "NaN": sends(lambda p: torch.full_like(p, float("nan"))),
    "1e9": sends(lambda p: torch.full_like(p, 1e9)),
    "zeros": sends(torch.zeros_like),
    "wrong shape": sends(lambda p: torch.zeros(2, 2)),
    "hang or crash": hangs_or_crashes,
    "replay": lambda node, message: [node.honest(node.seen[0])],
}


@pytest.fixture
def nodes(tmp_path: Path) -> list[Node]:
    """Twenty devices of one user, whose data are read once: the cost is then that of the engine."""

    def opened(user: int) -> Callable[[], Client]:
        kept = client(user, 1)()
        return lambda: kept

    return [Node(100 + i, tmp_path, opened(i)) for i in range(20)]


def strategy(made: Sequence[Node], folder: Path, p: hs.PrivacyPlan) -> MirrorStrategy:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    trainer = hs.Trainer(model, loss_fn, optimizer=optimizer, plan=p, unsafe_seed=5, progress=False)
    return MirrorStrategy(trainer, enrolled(made), run_dir=folder, settings=SETTINGS)


@pytest.mark.nightly
def test_fifty_rounds_with_six_faulty_of_twenty(tmp_path: Path, nodes: list[Node]) -> None:
    """The run ends as one without the faulty would, but for the one that sends 1e9: that one is clipped, and counts.

    Same seed, so that noise and draws agree. The replaying node is heard once, in its first round.
    """
    p = plan(steps=ROUNDS, sampling_rate=0.99, expected_batch_size=EXPECTED, max_grad_norm=0.05)
    for node, reply in zip(nodes, FAULTS.values(), strict=False):
        node.reply = reply
    faulty = strategy(nodes, tmp_path / "faulty", p)
    faulty.start(FakeGrid(nodes))
    assert faulty.result is not None
    assert faulty.result.updates == ROUNDS
    assert set(faulty.refused) == {"error", "malformed", "signature"}
    for node in (n for n, kind in zip(nodes, FAULTS, strict=False) if kind != "1e9"):
        node.reply = lambda node, message: []
        node.online = False
    replayer = nodes[list(FAULTS).index("replay")]
    replayer.reply, replayer.online = (lambda n, m: [n.honest(m)] if len(n.seen) == 1 else crashes(n, m)), True
    replayer.seen.clear()
    clean = strategy(nodes, tmp_path / "clean", p)
    clean.start(FakeGrid(nodes))
    ends = [flatten(trainable(s.trainer.model)).detach() for s in (faulty, clean)]
    assert float((ends[0] - ends[1]).abs().max()) < 1e-6
    assert float((ends[0] - flatten(trainable(linear())).detach()).abs().max()) > 0.05


@pytest.mark.parametrize("kind", [*FAULTS, "-1e9", "1e38", "honest"])
def test_one_client_moves_the_mean_by_no_more_than_its_share(tmp_path: Path, nodes: list[Node], kind: str) -> None:
    """With noise and draws frozen: the release with the client, less that without, is at most C / expected cohort."""
    more = {
        "-1e9": sends(lambda p: torch.full_like(p, -1e9)),
        "1e38": sends(lambda p: torch.full_like(p, 3e38)),
        "honest": lambda node, message: [node.honest(message)],
    }
    p = plan(steps=2, sampling_rate=1.0, expected_batch_size=EXPECTED, max_grad_norm=0.05)
    releases: list[Tensor] = []
    for reply in ((FAULTS | more)[kind], crashes):
        nodes[3].reply = reply
        engine = strategy(nodes, tmp_path / "unused", p)
        engine.grid = FakeGrid(nodes)
        folder = tmp_path / f"{len(releases)}"
        folder.mkdir()
        releases.append(flatten(source(folder, engine, p, linear(), UnsafeSeed(2)).release()))
    share = norm([releases[0] - releases[1]]) / (p.max_grad_norm / EXPECTED)
    assert share <= 1 + 2e-6
    if kind in ("1e9", "-1e9", "honest"):
        assert share > 0.9
