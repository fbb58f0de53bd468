"""A node: opens its own users, and nothing else."""

from __future__ import annotations

from flwr.app import Context

from halfsilver.federated import PrivateUsers, TensorUsers
from halfsilver.federated.flower import Client, make_client_app

from . import task


def setup(context: Context) -> Client:
    """Of a node that was started with ``--node-config 'signing-key="node1" data="node1.safetensors"'``."""
    columns, keys = task.read(str(context.node_config["data"]))
    return Client(
        model=task.model(),
        loss_fn=task.loss_fn,
        users=PrivateUsers(TensorUsers(columns, users=keys)),
        local=task.LOCAL,
    )


app = make_client_app(setup)
