"""The nodes' side: train the requested users, clip each update, and sign the sum."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from halfsilver._core.averaging import copy_to
from halfsilver._core.local_training import LocalTraining
from halfsilver._core.tensors import LossFn, Tensors, trainable
from halfsilver.errors import ConfigError
from halfsilver.federated.flower.keys import private_key, sign, statement
from halfsilver.federated.flower.wire import CENTRE, MODEL, PROOF, TASK, UPDATE, fixed_part, from_record, to_record
from halfsilver.privacy.users import Fold, InProcess, PrivateUsers, Round

KEY = "signing-key"  # in the node's configuration: the path of the key file that the node was started with


@dataclass(frozen=True, kw_only=True)
class Client:
    """What a node contributes: the model's architecture and its own users.

    Args:
        model: A model with the same architecture, frozen weights and buffers as the server's.
        loss_fn: A function of model and batch that returns one number per example.
        users: The users of this node, numbered from 0 as they were enrolled.
        local: How each user trains.
    """

    model: nn.Module
    loss_fn: LossFn
    users: PrivateUsers
    local: LocalTraining


def make_client_app(setup: Callable[[Context], Client]) -> ClientApp:
    """Make the `ClientApp` of a node, which serves one user or many and answers with one signed sum of clipped updates.

    Start the node with ``--node-config 'signing-key="node.key"'``. If anything fails, the server learns that it failed
    and not why, because the cause could reveal something about a user. The node's own log has the cause.

    Args:
        setup: A function from Flower's context to a `Client`. It is called for every request, in a process of its own,
            and must open the users of this node only.

    Returns:
        The app.

    Example:
        >>> import torch
        >>> from halfsilver.federated import LocalTraining, PrivateUsers, TensorUsers
        >>> def setup(context):
        ...     rows = torch.randn(20, 3), torch.randn(20)
        ...     users = PrivateUsers(TensorUsers(rows, users=[i // 5 for i in range(20)]))
        ...     loss_fn = lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]).square()
        ...     return Client(model=torch.nn.Linear(3, 1), loss_fn=loss_fn, users=users, local=LocalTraining(lr=0.1))
        >>> type(make_client_app(setup)).__name__
        'ClientApp'
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            return answer(message, context, setup(context))
        except Exception:
            logging.getLogger(__name__).exception("This node could not answer")
            raise RuntimeError("This node could not answer; its own log says why.") from None

    return app


def answer(message: Message, context: Context, client: Client) -> Message:
    """Train the users of one request and return the signed reply.

    Args:
        message: The request of `MirrorStrategy`.
        context: Flower's context of the node, which names the file of the signing key.
        client: The node's model and users.

    Returns:
        The reply.

    Raises:
        ConfigError: If the message is no such request, or if the server has another model.
    """
    task, arrays, centre = _request(message.content)
    params, steps, nonce = trainable(client.model), int(task["step"]), bytes(task["nonce"])
    values, middle = from_record(arrays, params), None if centre is None else from_record(centre, params)
    if values is None or (middle is None) != (centre is None) or task["fixed"] != fixed_part(client.model):
        raise ConfigError("Expected the server to have the same model. Frozen weights and buffers must agree too.")
    copy_to(params, values)
    update = to_record(_sum(client, [int(u) for u in task["users"]], steps, float(task["clip"]), middle))
    about = message.metadata
    said = statement(run=about.run_id, step=steps, node=about.dst_node_id, nonce=nonce, arrays=update)
    proof = ConfigRecord({"signature": sign(private_key(str(context.node_config[KEY])), said)})
    return Message(RecordDict({UPDATE: update, PROOF: proof}), reply_to=message)


def _request(content: RecordDict) -> tuple[dict[str, Any], ArrayRecord, ArrayRecord | None]:
    task, arrays, centre = content[TASK], content[MODEL], content.get(CENTRE)
    if isinstance(task, ConfigRecord) and isinstance(arrays, ArrayRecord) and isinstance(centre, ArrayRecord | None):
        return dict(task), arrays, centre
    raise ConfigError("Expected a request of MirrorStrategy.")


def _sum(client: Client, users: list[int], step: int, clip: float, centre: Tensors | None) -> Tensors:
    """Clip each user's update here, so that only a sum of several leaves the node.

    The sum leaves in float64, because rounding a long sum would move it by more than one user may. The update of a
    single user is clipped again by the server, so it can be rounded.
    """
    params, engine = trainable(client.model), InProcess(client.users, client.local)
    asked = Round(
        step=step,
        model=client.model,
        loss_fn=client.loss_fn,
        users=torch.tensor(users, dtype=torch.int64),
        max_grad_norm=clip,
        seed=secrets.randbits(62),
        centre=centre,
    )
    fold = Fold(params, clip)
    for contribution in engine.contributions(asked):
        fold.add(contribution)
    one = len(users) == 1
    pairs = zip(fold.total.tensors, params, strict=True)
    return [t.float() if one and p.dtype == torch.float32 else t for t, p in pairs]
