"""A node of our own making, which speaks to a SuperLink as a SuperNode does and says what it likes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

_PURPOSE = b"halfsilver: reply of a node, version 1\n"
_LINK = 1  # the node id of the SuperLink itself


@dataclass(frozen=True)
class Request:
    """What a node needs to know of a request to answer it, however it came to know."""

    message_id: str
    run_id: int
    step: int
    nonce: bytes
    shapes: Sequence[tuple[int, ...]]


class RawNode:
    """Authenticates with the key in `key_file`. `clock` is the time that it claims."""

    def __init__(self, port: int, ca: Path, key_file: Path, clock: Callable[[], datetime] = now) -> None:
        key = serialization.load_ssh_private_key(key_file.read_bytes(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key, self._clock, self._public = key, clock, public_key_to_bytes(key.public_key())
        auth = NodeAuthHttpInterceptor(key, key.public_key())
        self._client = FleetHttpClient.from_server_address(
            f"127.0.0.1:{port}", False, ca.read_bytes(), interceptors=[auth]
        )
        self.node_id = 0

    def activate(self) -> bool:
        """Whether the link let it in."""
        return self._tried(self._activate)

    def _activate(self) -> None:
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=600)
        self.node_id = self._client.ActivateNode(request).node_id

    def pull(self) -> Request | None:
        """The next request of the link to this node."""
        node = Node(node_id=self.node_id)
        answer = self._client.PullMessages(PullMessagesRequest(node=node))
        if not answer.messages_list:
            return None
        run_id, tree = answer.messages_list[0].metadata.run_id, answer.message_object_trees[0]
        return _read(self._fetched(node, run_id, tree), run_id, tree.object_id)

    def _fetched(self, node: Node, run_id: int, tree: ObjectTree) -> Message:
        pull = make_pull_object_fn_protobuf(self._client.PullObject, node, run_id)
        confirm = make_confirm_message_received_fn_protobuf(self._client.ConfirmMessageReceived, node, run_id)
        return pull_and_inflate_object_from_tree(tree, pull, confirm, return_type=Message)

    def push(self, request: Request, value: float, as_node: int | None = None) -> bool:
        """Whether the link kept a reply of constant `value`, signed by this node, as that of `as_node`."""
        return self._tried(lambda: self._push(request, value, as_node or self.node_id))

    def _push(self, request: Request, value: float, sender: int) -> None:
        arrays = ArrayRecord({str(i): Array(np.full(s, value, np.float32)) for i, s in enumerate(request.shapes)})
        proof = ConfigRecord({"signature": self._signature(request, sender, arrays)})
        message = make_message(_metadata(request, sender), RecordDict({"update": arrays, "proof": proof}))
        message.metadata.__dict__["_message_id"] = message.object_id
        answer = self._client.PushMessages(
            PushMessagesRequest(
                node=Node(node_id=self.node_id),
                messages_list=[message_to_proto(remove_content_from_message(message))],
                message_object_trees=[get_object_tree(message)],
            )
        )
        if not answer.objects_to_push:
            raise RuntimeError("the link does not want this reply")
        push = make_push_object_fn_protobuf(
            self._client.PushObject, Node(node_id=self.node_id), request.run_id, answer.session_id
        )
        push_objects(get_all_nested_objects(message), push, object_ids_to_push=set(answer.objects_to_push))

    def _signature(self, request: Request, sender: int, arrays: ArrayRecord) -> bytes:
        parts = [[name, a.dtype, list(a.shape), hashlib.sha256(a.data).hexdigest()] for name, a in arrays.items()]
        said = json.dumps([request.run_id, request.step, sender, request.nonce.hex(), parts]).encode()
        return self._key.sign(_PURPOSE + said, ec.ECDSA(hashes.SHA256()))

    def _tried(self, action: Callable[[], None]) -> bool:
        try:
            with mock.patch("flwr.supernode.node_auth_http_interceptor.now", self._clock):
                action()
        except (httpx.HTTPError, RuntimeError):
            return False
        return True


def _read(message: Message, run_id: int, message_id: str) -> Request:
    task: Any = message.content["task"]
    model: Any = message.content["model"]
    return Request(message_id, run_id, task["step"], task["nonce"], [a.shape for a in model.values()])


def _metadata(request: Request, sender: int) -> Metadata:
    return Metadata(
        run_id=request.run_id,
        message_id="",
        src_node_id=sender,
        dst_node_id=_LINK,
        reply_to_message_id=request.message_id,
        group_id="",
        created_at=now().timestamp(),
        ttl=5.0,
        message_type="train",
    )
