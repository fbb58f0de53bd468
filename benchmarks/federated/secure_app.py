"""Secure aggregation before the DP core: what Flower's SecAgg+ costs, and what the server still sees.

    PYTHON benchmarks/federated/secure_app.py --nodes 20 --rounds 4            SecAgg+
    PYTHON benchmarks/federated/secure_app.py --nodes 20 --rounds 4 --plain    the same without it

PYTHON needs halfsilver with its extra `sklearn`, and flwr[simulation]==1.41.0 with Ray. A node is a user with ten
digits, who trains, clips the update and sends it. The server gets the sum of a round from the protocol, gives it to
the trainer as one contribution of so many users, and goes on as always: cap, noise, mirror, ledger. With `--faulty
K`, the first K nodes fail after they have shared their keys, so their masks must be reconstructed. The last line is
JSON. Times are those of the simulation on this machine. Bytes are those of all messages of a round, in both
directions. `off` is the largest difference from the sum of the updates, in steps of the grid to which the protocol
rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord
from flwr.server import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.default_workflows import default_fit_workflow
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from sklearn.datasets import load_digits
from torch import nn

import halfsilver as hs
from halfsilver.federated import LocalTraining, local_update
from halfsilver.privacy.users import Contribution, Round

CLIP, LEVELS, ROWS_EACH, TEST = 1.0, 2**22, 10, 397
LOCAL = LocalTraining(lr=0.2, batch_size=5, epochs=2)
FAULTY, WIDTH = "SECURE_APP_FAULTY", "SECURE_APP_WIDTH"  # Ray's workers are processes of their own


def make_model(width: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def wrong(model: Any, batch: Any) -> torch.Tensor:
    return torch.ne(model(batch[0]).argmax(1), batch[1]).double()


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Features and labels in a fixed random order; the first `TEST` rows are the test."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x, dtype=torch.float32)[order] / 16, torch.tensor(y)[order]


class User(NumPyClient):
    """Trains on its ten rows and returns its clipped update."""

    def __init__(self, number: int) -> None:
        self.number = number

    def fit(self, parameters: list[np.ndarray], config: Any) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        if self.number < int(os.environ[FAULTY]):
            raise RuntimeError("this node fails after it has shared its keys")
        model, (x, y) = make_model(int(os.environ[WIDTH])), digits()
        torch.nn.utils.vector_to_parameters(torch.tensor(parameters[0]), model.parameters())
        first = TEST + ROWS_EACH * self.number
        update = local_update(model, loss_fn, (x[first : first + ROWS_EACH], y[first : first + ROWS_EACH]), LOCAL)
        flat = torch.cat([t.double().flatten() for t in update])
        # The protocol rounds each number to a grid at random, so the update is clipped that much shorter.
        bound = CLIP - math.sqrt(len(flat)) * 2 * CLIP / LEVELS
        return [(flat * min(1.0, bound / max(float(flat.norm()), 1e-12))).numpy()], 1, {}


class Ask(FedAvg):
    """Asks the given nodes, and keeps the sum of what arrives."""

    total: np.ndarray | None
    answers: int

    def ask(self, nodes: list[int], parameters: Any) -> None:
        self.nodes, self.start, self.total, self.answers = nodes, parameters, None, 0

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        return [(SimpleNamespace(node_id=node), FitIns(self.start, {})) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        sent = [parameters_to_ndarrays(result.parameters)[0] for _, result in results]
        self.answers = len(sent)
        if sent:  # SecAgg+ replaces what each node sent by the mean of all
            self.total = np.sum(sent, axis=0)
        return None, {}


class Counting:
    """A grid that counts the bytes of arrays and settings in its messages."""

    def __init__(self, grid: Grid) -> None:
        self._grid, self.bytes = grid, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Any, **options: Any) -> Any:
        out = list(messages)
        back = list(self._grid.send_and_receive(out, **options))
        self.bytes += sum(size_of(m.content) for m in (*out, *back) if m.has_content())
        return back


def size_of(content: RecordDict) -> int:
    """Bytes of the arrays and settings of a message."""
    arrays = sum(len(a.data) for r in content.array_records.values() for a in r.values())
    values = [v for r in content.config_records.values() for v in r.values()]
    return arrays + sum(_bytes(v) for v in values)


def _bytes(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    return sum(map(_bytes, value)) if isinstance(value, list) else 8


class SecureSum:
    """An engine that gets the sum of a round from Flower's workflow. The sender of a sum is trusted to have clipped."""

    def __init__(self, grid: Counting, context: Context, nodes: int, plain: bool) -> None:
        self._ask = Ask()
        self._grid, self._context = grid, LegacyContext(context, strategy=self._ask)
        self._plain, self.population = plain, nodes
        self._workflow = SecAggPlusWorkflow(
            num_shares=1.0, reconstruction_threshold=0.5, max_weight=1.0, clipping_range=CLIP, quantization_range=LEVELS
        )
        self._nodes = list(grid.get_node_ids())
        self.rounds: list[dict[str, Any]] = []

    def contributions(self, round: Round) -> Iterator[Contribution]:
        drawn = [self._nodes[i] for i in round.users.tolist()]
        if len(drawn) < 3:  # fewer cannot share keys; they contribute zero
            return
        begun, sent, ask = time.perf_counter(), self._grid.bytes, self._ask
        params = [p for p in round.model.parameters() if p.requires_grad]
        flat = torch.cat([p.detach().flatten() for p in params])
        parameters = ndarrays_to_parameters([flat.numpy()])
        ask.ask(drawn, parameters)
        state = self._context.state
        state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: round.step + 1})
        state.array_records[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(parameters, keep_input=True)
        workflow: Any = default_fit_workflow if self._plain else self._workflow
        workflow(self._grid, self._context)
        self.rounds.append(
            {
                "asked": len(drawn),
                "answers": ask.answers,
                "seconds": round_(time.perf_counter() - begun),
                "bytes": self._grid.bytes - sent,
                "off": None if ask.total is None else round_(self._off(ask.total, flat) / (2 * CLIP / LEVELS)),
            }
        )
        if ask.total is None:
            return
        total = torch.split(torch.from_numpy(np.asarray(ask.total, dtype=np.float64)), [p.numel() for p in params])
        yield Contribution([t.view(p.shape) for t, p in zip(total, params, strict=True)], users=len(drawn))

    def _off(self, total: np.ndarray, flat: torch.Tensor) -> float:
        """The largest difference from the sum of the updates of all nodes that answered, which all are asked."""
        updates = [User(i).fit([flat.numpy()], {})[0][0] for i in range(int(os.environ[FAULTY]), self.population)]
        return float(np.abs(np.sum(updates, axis=0) - total).max())


def round_(value: float) -> float:
    return round(value, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--faulty", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="without secure aggregation")
    args = parser.parse_args()
    os.environ[FAULTY], os.environ[WIDTH] = str(args.faulty), str(args.width)
    found: dict[str, Any] = {}
    server = ServerApp()

    @server.main()
    def _serve(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < args.nodes:
            time.sleep(0.1)
        engine = SecureSum(Counting(grid), context, args.nodes, args.plain)
        found.update(train(engine, args.rounds, args.width))

    client = ClientApp(
        lambda context: User(int(context.node_config["partition-id"])).to_client(),
        mods=[] if args.plain else [secaggplus_mod],
    )
    run_simulation(server, client, num_supernodes=args.nodes, backend_config={"client_resources": {"num_cpus": 1}})
    asked = {"secure": not args.plain, "nodes": args.nodes, "faulty": args.faulty}
    print(json.dumps({**asked, **found, "versions": {name: version(name) for name in ("flwr", "ray")}}))


def train(engine: SecureSum, rounds: int, width: int) -> dict[str, Any]:
    """A private run behind the engine."""
    x, y = digits()
    model = make_model(width)
    plan = hs.PrivacyPlan(
        steps=rounds,
        sampling_rate=1.0,
        expected_batch_size=engine.population,
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
        unit="user",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = hs.Trainer(model, loss_fn, optimizer=optimizer, plan=plan, metrics={"error": wrong})
    with tempfile.TemporaryDirectory() as folder:
        result = trainer.fit(engine, run_dir=folder, delta=1e-3)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "epsilon": round_(result.epsilon()),
        "test": trainer.evaluate((x[:TEST], y[:TEST])),
        "rounds": engine.rounds,
    }


if __name__ == "__main__":
    main()
