"""A node without torch: the whole protocol in NumPy and a signature. `mode` in its configuration makes it a bad one."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

PURPOSE = b"halfsilver: reply of a node, version 1\n"
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    mode, value = str(context.node_config.get("mode", "honest")), float(context.node_config.get("value", 0.01))
    time.sleep(float(context.node_config.get("delay", 0.0)))
    if mode == "hang":
        time.sleep(3600)
    if mode == "crash":
        raise ArithmeticError("this node crashes")
    if mode == "replay" and "said" in context.state:
        return Message(said_before(context), reply_to=message)
    arrays = updates(message, mode, value)
    content = RecordDict({"update": arrays, "proof": ConfigRecord({"signature": signature(message, context, arrays)})})
    if mode == "replay":
        context.state["said"], context.state["proof"] = arrays, content["proof"]
    return Message(content, reply_to=message)


def updates(message: Message, mode: str, value: float) -> ArrayRecord:
    model: Any = message.content["model"]
    number = {"nan": float("nan"), "large": 1e9, "zeros": 0.0}.get(mode, value)
    shapes = [(2, 2) if mode == "shape" else a.shape for a in model.values()]
    return ArrayRecord({str(i): Array(np.full(s, number, np.float32)) for i, s in enumerate(shapes)})


def said_before(context: Context) -> RecordDict:
    return RecordDict({"update": context.state["said"], "proof": context.state["proof"]})


def signature(message: Message, context: Context, arrays: ArrayRecord) -> bytes:
    task: Any = message.content["task"]
    parts = [[name, a.dtype, list(a.shape), hashlib.sha256(a.data).hexdigest()] for name, a in arrays.items()]
    about = message.metadata
    said = json.dumps([about.run_id, task["step"], about.dst_node_id, task["nonce"].hex(), parts]).encode()
    data = Path(str(context.node_config["signing-key"])).read_bytes()
    key = serialization.load_ssh_private_key(data, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key.sign(PURPOSE + said, ec.ECDSA(hashes.SHA256()))
