"""Flower's own simulation with clients that only answer: seconds a round. Needs flwr[simulation], not halfsilver.

Runs as a script, in whichever Python has Ray; the last line that it prints is JSON. Clients return one ready-made
array of as many numbers as the model has; the strategy is Flower's FedAvg, without evaluation.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

_app = ClientApp()
_ready: dict[int, Any] = {}  # by size: made once in each of Ray's workers


@_app.train()
def _answer(message: Message, context: Context) -> Message:
    size = message.content.array_records["arrays"]["w"].numpy().size
    if size not in _ready:
        _ready[size] = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    arrays, metrics = ArrayRecord({"w": Array(_ready[size])}), MetricRecord({"num-examples": 1})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class _Timed(FedAvg):
    """Notes when a round begins and when all replies have been added up."""

    def __init__(self, nodes: int) -> None:
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=nodes, min_train_nodes=nodes)
        self.seconds: list[float] = []
        self.replies: list[int] = []

    def configure_train(self, *args: Any, **options: Any) -> Any:
        self._started = time.perf_counter()
        return super().configure_train(*args, **options)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrived = list(replies)
        done = super().aggregate_train(server_round, arrived)
        self.seconds.append(time.perf_counter() - self._started)
        self.replies.append(sum(not reply.has_error() for reply in arrived))
        return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=500_416)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    strategy, server = _Timed(args.nodes), ServerApp()

    @server.main()
    def _serve(grid: Grid, context: Context) -> None:
        start = ArrayRecord({"w": Array(np.zeros(args.parameters, dtype=np.float32))})
        strategy.start(grid=grid, initial_arrays=start, num_rounds=args.rounds)

    run_simulation(server, _app, num_supernodes=args.nodes, backend_config={"client_resources": {"num_cpus": 1}})
    versions = {name: version(name) for name in ("flwr", "ray", "numpy")}
    print(json.dumps({"seconds": strategy.seconds, "replies": strategy.replies, "versions": versions}))


if __name__ == "__main__":
    main()
