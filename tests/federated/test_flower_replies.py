"""Whose replies count: forged, repeated, oversized and unreadable ones, and those that never come."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict

from halfsilver._core.tensors import norm, trainable
from halfsilver.federated import InProcess
from halfsilver.federated.flower.wire import to_record
from tests.federated.flower_grid import (
    FAST,
    FakeGrid,
    Node,
    Reply,
    asked,
    client,
    nodes,
    server_process,
    signed_by,
    strategy,
    total,
)
from tests.federated.helpers import LOCAL, linear

_ = server_process  # a fixture


def from_node(message: Message, node_id: int) -> Message:
    message.metadata.__dict__["_src_node_id"] = node_id
    return message


def big(node: Node) -> ArrayRecord:
    return to_record([torch.full_like(p, 7.0) for p in trainable(linear())])


def oversize(node: Node, message: Message) -> Sequence[Message]:
    return [signed_by(node, message, to_record([torch.zeros(200_000), torch.zeros(3)]))]


def strange(node: Node, message: Message) -> Sequence[Message]:
    header = Array("float32", (3, 6), "numpy.ndarray", b"\x93NUMPY\x01\x00" + b"\xff" * 40)
    return [signed_by(node, message, ArrayRecord({"0": header, "1": Array(torch.zeros(3).numpy())}))]


def untokenizable(node: Node, message: Message) -> Sequence[Message]:
    """A header on which NumPy's parser fails with an error that is not a ValueError."""
    header = b"{'a': '''".ljust(118) + b"\n"
    array = Array("float32", (3, 6), "numpy.ndarray", b"\x93NUMPY\x01\x00" + bytes([len(header), 0]) + header)
    return [signed_by(node, message, ArrayRecord({"0": array, "1": Array(torch.zeros(3).numpy())}))]


def integers() -> ArrayRecord:
    return ArrayRecord({str(i): Array(p.detach().int().numpy()) for i, p in enumerate(linear().parameters())})


INTRUDERS: dict[str, tuple[Reply, str]] = {
    "error": (lambda node, message: [1 / 0 for _ in "x"], "error"),  # type: ignore[misc]
    "unsigned": (lambda n, m: [Message(RecordDict({"update": big(n)}), reply_to=m)], "malformed"),
    "no content": (lambda n, m: [Message(RecordDict(), reply_to=m)], "malformed"),
    "another key": (lambda n, m: [signed_by(n, m, big(n), n.folder / "node101")], "signature"),
    "another node id": (lambda n, m: [signed_by(n, m, big(n), node=101)], "signature"),
    "another run": (lambda n, m: [signed_by(n, m, big(n), run=8)], "signature"),
    "another round": (lambda n, m: [signed_by(n, m, big(n), step=3)], "signature"),
    "another request": (lambda n, m: [signed_by(n, m, big(n), nonce=b"0" * 32)], "signature"),
    "other arrays": (lambda n, m: [signed_by(n, m, big(n), arrays=to_record([torch.zeros(1)]))], "signature"),
    "a node not asked": (lambda n, m: [from_node(signed_by(n, m, big(n)), 5)], "not asked"),
    "too large": (oversize, "too large"),
    "broken header": (strange, "malformed"),
    "untokenizable header": (untokenizable, "malformed"),
    "wrong shape": (lambda n, m: [signed_by(n, m, to_record([torch.zeros(2, 2), torch.zeros(3)]))], "malformed"),
    "too few": (lambda n, m: [signed_by(n, m, to_record([torch.zeros(3, 6)]))], "malformed"),
    "integers": (lambda n, m: [signed_by(n, m, integers())], "malformed"),
}


@pytest.mark.parametrize("name", INTRUDERS)
def test_a_reply_that_is_not_the_nodes_own_adds_nothing(tmp_path: Path, name: str) -> None:
    """The sum is that of the others, to the last bit; and with the honest reply behind it, that of all."""
    reply, reason = INTRUDERS[name]
    made = nodes(tmp_path, [10, 10], reply)
    engine = strategy(made, tmp_path)
    engine.grid = FakeGrid(made)
    without = total(engine, asked([3, 12, 13]))
    assert dict(engine.refused) == {reason: 1}
    assert torch.equal(without, total(engine, asked([12, 13])))
    if name != "error":
        made[0].reply = lambda node, message: [*reply(node, message), node.honest(message)]
        assert torch.equal(
            total(engine, asked([3])), total(InProcess(client(0, 20)().users, LOCAL), asked([3])).float()
        )


def test_one_reply_a_node_and_round(tmp_path: Path) -> None:
    """The second of two, and last round's once more, are not heard."""
    made = nodes(tmp_path, [10, 10], lambda n, m: [n.honest(m), n.honest(m), n.honest(n.seen[0])])
    engine = strategy(made, tmp_path)
    engine.grid = FakeGrid(made)
    once = total(engine, asked([3, 4]))
    again = total(engine, asked([3, 4], step=1))
    assert torch.equal(once, again)
    assert norm([once]) > 0.1
    assert dict(engine.refused) == {"not asked": 4}
    made[0].reply = lambda n, m: [n.honest(n.seen[0])]
    assert norm([total(engine, asked([3, 4], step=2))]) == 0.0
    assert engine.refused["signature"] == 1


def test_a_silo_is_held_to_its_users_and_a_device_to_one(tmp_path: Path) -> None:
    made = nodes(tmp_path, [10, 1], lambda n, m: [signed_by(n, m, big(n))])
    made[1].reply = made[0].reply
    engine = strategy(made, tmp_path)
    engine.grid = FakeGrid(made)
    for users, most in (([1, 2, 3], 0.9), ([10], 0.3), ([5], 0.3)):
        assert norm([total(engine, asked(users))]) == pytest.approx(most, rel=1e-3)


def test_a_person_at_two_silos_has_two_contributions(tmp_path: Path) -> None:
    """A limit that the threat model names: users are numbers of their node, and nobody can compare them."""
    made = nodes(tmp_path, [10, 10], lambda n, m: [signed_by(n, m, big(n))])
    made[1].reply = made[0].reply
    engine = strategy(made, tmp_path)
    engine.grid = FakeGrid(made)
    for users, most in (([3], 0.3), ([13], 0.3), ([3, 13], 0.6)):
        assert norm([total(engine, asked(users))]) == pytest.approx(most, rel=1e-3)


def test_replies_that_do_not_come_end_with_the_round(tmp_path: Path) -> None:
    made = nodes(tmp_path, [10, 10], lambda node, message: [])
    engine = strategy(made, tmp_path, settings=replace(FAST, round_seconds=0.2))
    engine.grid = FakeGrid(made)
    started = time.monotonic()
    assert norm([total(engine, asked([3, 12]))]) > 0.1
    assert 0.1 < time.monotonic() - started < 2.0


class Unreadable(FakeGrid):
    """A link whose pulls fail: always for the node `bad`, and the first `busy` times for anybody."""

    bad, busy = 0, 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        numbers = list(message_ids)
        self.busy -= 1
        if self.busy >= 0 or self.sent[int(numbers[0].split()[1])].metadata.dst_node_id == self.bad:
            raise ValueError("object of type Elephant is not supported")
        return super().pull_messages(numbers)


def test_an_unreadable_reply_takes_no_other_with_it_and_a_busy_link_none(tmp_path: Path) -> None:
    made = nodes(tmp_path, [10, 10])
    engine = strategy(made, tmp_path)
    engine.grid = grid = Unreadable(made)
    both = total(engine, asked([3, 12, 13]))
    grid.busy = 3
    assert torch.equal(total(engine, asked([3, 12, 13])), both)
    grid.bad = 100
    assert torch.equal(total(engine, asked([3, 12, 13])), total(engine, asked([12, 13])))


def test_a_link_that_is_gone_is_an_error_after_five_attempts(tmp_path: Path) -> None:
    made = nodes(tmp_path, [10, 10])
    attempts = []

    class Gone(FakeGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            attempts.append(messages)
            raise ConnectionError("the link is gone")

    engine = strategy(made, tmp_path)
    engine.grid = Gone(made)
    with pytest.raises(ConnectionError):
        total(engine, asked([3]))
    assert len(attempts) == 5


def test_a_round_in_which_nobody_counts_is_told_to_the_operator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = nodes(tmp_path, [10, 10], INTRUDERS["error"][0])
    engine = strategy(made, tmp_path)
    engine.grid = FakeGrid(made)
    for users, told in (([3, 12], 0), ([], 0), ([3], 1)):
        total(engine, asked(users))
        assert caplog.text.count("no node answered") == told
