"""Which replies count: one per node and round, from the node that was asked, signed with its enrolled key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from halfsilver.federated.flower.keys import signed, statement
from halfsilver.federated.flower.wire import PROOF, UPDATE, from_record, largest_reply, size
from halfsilver.privacy.users import Contribution


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one node was asked in a round, and the key that its answer must be signed with."""

    node: int
    run: int
    step: int
    nonce: bytes
    users: int
    key: ec.EllipticCurvePublicKey


class Gate:
    """Admits the replies that were requested, once each.

    Guarantee: a contribution comes from the holder of the enrolled key of a node that was asked in this round, was made
    for this request, and is the only one of that node. Whatever is wrong with a reply, no error follows: the node is
    missing, and missing nodes count as zero. Reasons are counted in `refused`, for tests. They reveal who was drawn, so
    they must not be published.
    """

    def __init__(self, params: Sequence[Tensor], reply_bytes: int | None, refused: Counter[str]) -> None:
        self._params, self.refused = params, refused
        self._reply_bytes = largest_reply(params) if reply_bytes is None else reply_bytes
        self._open: dict[int, Asked] = {}

    def expect(self, asked: Asked) -> None:
        self._open[asked.node] = asked

    def admitted(self, replies: Iterable[Message]) -> Iterator[Contribution]:
        for reply in replies:
            contribution: Contribution | str = "malformed"
            with suppress(Exception):  # a header, say, on which NumPy's parser fails in a way of its own
                contribution = self._checked(reply)
            if isinstance(contribution, str):
                self.refused[contribution] += 1
            else:
                del self._open[reply.metadata.src_node_id]
                yield contribution

    def _checked(self, reply: Message) -> Contribution | str:
        asked = self._open.get(reply.metadata.src_node_id)
        if reply.has_error() or not reply.has_content():
            return "error"
        if asked is None or reply.metadata.run_id != asked.run:
            return "not asked"
        update, signature = _parts(reply.content)
        if update is None or signature is None:
            return "malformed"
        if size(update) > self._reply_bytes:
            return "too large"
        said = statement(run=asked.run, step=asked.step, node=asked.node, nonce=asked.nonce, arrays=update)
        if not signed(asked.key, said, signature):
            return "signature"
        tensors = from_record(update, self._params)
        return "malformed" if tensors is None else Contribution(tensors, asked.users)


def _parts(content: RecordDict) -> tuple[ArrayRecord | None, bytes | None]:
    update, proof = content.get(UPDATE), content.get(PROOF)
    signature = proof.get("signature") if isinstance(proof, ConfigRecord) else None
    return update if isinstance(update, ArrayRecord) else None, signature if isinstance(signature, bytes) else None
