"""A Flower grid in this process: nodes with real keys, and answers that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict, UserConfig
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

import halfsilver as hs
from halfsilver._core.tensors import flatten, trainable
from halfsilver.federated import PrivateUsers, Round, TensorUsers
from halfsilver.federated.flower import Client, Enrolment, Member, MirrorStrategy, Settings, answer, fingerprint
from halfsilver.federated.flower.keys import private_key, sign, statement
from halfsilver.privacy.users import Fold
from tests.federated.helpers import LOCAL, columns, linear, loss_fn, plan

PEM = serialization.Encoding.PEM


@dataclass
class Node:
    """`reply` makes what comes back to a request: the messages, in order."""

    node_id: int
    folder: Path
    client: Callable[[], Client]
    users: int = 1
    reply: Callable[[Node, Message], Sequence[Message]] = lambda node, message: [node.honest(message)]
    online: bool = True
    seen: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        key = ec.generate_private_key(ec.SECP384R1())
        self.key_file = self.folder / f"node{self.node_id}"
        plain = serialization.NoEncryption()
        self.key_file.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, plain))
        self.public = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)

    @property
    def member(self) -> Member:
        return Member(name=f"node{self.node_id}", fingerprint=fingerprint(self.public), users=self.users)

    def context(self, key_file: Path | None = None) -> Context:
        config: UserConfig = {"signing-key": str(key_file or self.key_file)}
        return Context(run_id=7, node_id=self.node_id, node_config=config, state=RecordDict(), run_config={})

    def honest(self, message: Message) -> Message:
        return answer(message, self.context(), self.client())


def enrolled(nodes: Iterable[Node]) -> Enrolment:
    return Enrolment(tuple(n.member for n in nodes))


class FakeGrid(Grid):
    """A link that lets everybody in, and hands out whatever its nodes say."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = {n.node_id: n for n in nodes}
        self._replies: dict[str, list[Message]] = {}
        self.sent: list[Message] = []
        self.breaks_at: int | None = None  # the link dies before it takes that many messages

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        return Run.create_empty(7)

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [n.node_id for n in self.nodes.values() if n.online]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=i, public_key=self.nodes[i].public) for i in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            if self.breaks_at == len(self.sent):
                raise ConnectionError("the link is gone")
            number = f"message {len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            node = self.nodes[message.metadata.dst_node_id]
            node.seen.append(message)
            self._replies[number] = list(self._answers(node, message))
            numbers.append(number)
        return numbers

    def _answers(self, node: Node, message: Message) -> Sequence[Message]:
        try:
            return node.reply(node, message)
        except ArithmeticError as error:  # a ClientApp that raises: Flower sends an error in its place
            return [Message(Error(1, str(error)), reply_to=message)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [m for i in message_ids for m in self._replies.pop(i, [])]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


# ---- twenty users, and whatever a test needs to have them trained

FAST = Settings(poll_seconds=0.001, round_seconds=5.0, patience_seconds=0.0)
Reply = Callable[[Node, Message], Sequence[Message]]


@pytest.fixture(autouse=True)
def server_process() -> Iterator[None]:
    """What Flower sets in the process of a ServerApp."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, 1
    yield
    for name in ("_task_id", "_run_id", "_node_id"):
        setattr(TaskIdentity, name, None)


def client(first: int, users: int) -> Callable[[], Client]:
    """Users `first` to `first + users` of the 20 that every test has, six rows each."""
    rows, keys = slice(6 * first, 6 * (first + users)), [u for u in range(users) for _ in range(6)]

    def opened() -> Client:
        x, y = columns(120)
        return Client(
            model=linear(1),  # another start: the weights must come from the server
            loss_fn=loss_fn,
            users=PrivateUsers(TensorUsers((x[rows], y[rows]), users=keys)),
            local=LOCAL,
        )

    return opened


def nodes(folder: Path, sizes: Sequence[int], reply: Reply | None = None) -> list[Node]:
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    made = [
        Node(100 + i, folder, client(first, size), size)
        for i, (first, size) in enumerate(zip(firsts, sizes, strict=True))
    ]
    if reply is not None:
        made[0].reply = reply
    return made


def trainer(**options: Any) -> hs.Trainer:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    p = options.pop("plan", plan())
    return hs.Trainer(model, loss_fn, optimizer=optimizer, plan=p, progress=False, **options)


def strategy(made: Sequence[Node], folder: Path, **options: Any) -> MirrorStrategy:
    options.setdefault("settings", FAST)
    enrolment = options.pop("enrolment", enrolled(made))
    return MirrorStrategy(options.pop("trainer", trainer()), enrolment, run_dir=folder / "run", **options)


def asked(users: Sequence[int], step: int = 0, **changes: Any) -> Round:
    values: dict[str, Any] = {"step": step, "model": linear(), "loss_fn": loss_fn, "max_grad_norm": 0.3, "seed": 0}
    return Round(users=torch.tensor(users, dtype=torch.int64), **(values | changes))


def total(engine: Any, round: Round) -> Tensor:
    fold = Fold(trainable(round.model), round.max_grad_norm, users=len(round.users))
    for contribution in engine.contributions(round):
        fold.add(contribution)
    return flatten(fold.total.tensors)


def signed_by(node: Node, message: Message, arrays: ArrayRecord, key: Path | None = None, /, **changes: Any) -> Message:
    task = message.content["task"]
    about: dict[str, Any] = {"run": message.metadata.run_id, "step": task["step"], "nonce": task["nonce"]}
    said = statement(**(about | {"node": node.node_id, "arrays": arrays} | changes))
    proof = ConfigRecord({"signature": sign(private_key(key or node.key_file), said)})
    return Message(RecordDict({"update": arrays, "proof": proof}), reply_to=message)
