"""A server that writes down what went into each sum: for an experiment only, as it undoes the privacy of the run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

import halfsilver as hs
from halfsilver.federated import Contribution, Round
from halfsilver.federated.flower import Enrolment, MirrorStrategy, Settings

app = ServerApp()


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    enrolment, model = Enrolment.load(str(config["members"])), nn.Linear(16, 4)
    plan = hs.PrivacyPlan(
        steps=int(config["rounds"]),
        sampling_rate=1.0,  # everybody is asked in every round
        expected_batch_size=float(enrolment.population),
        noise_multiplier=1.0,
        unit="user",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hs.Trainer(model, loss_fn, optimizer=optimizer, plan=plan, mirror=hs.FirstOrder(0.5))
    strategy = MirrorStrategy(
        trainer,
        enrolment,
        run_dir=str(config["run-dir"]),
        public=(torch.eye(16), torch.arange(16) % 4),
        settings=Settings(
            round_seconds=float(config["round-seconds"]), min_online=int(config["min-online"]), patience_seconds=300.0
        ),
    )
    record = Record(strategy, Path(str(config["record"])))
    strategy.start(grid)
    record.write(finished=True)


class Record:
    """The first number of each contribution that reached a sum, and how long each round took."""

    def __init__(self, strategy: MirrorStrategy, path: Path) -> None:
        self._strategy, self._path, self._inner = strategy, path, strategy.contributions
        self._rounds: list[dict[str, Any]] = []
        strategy.contributions = self.contributions  # type: ignore[method-assign]

    def contributions(self, round: Round) -> Iterator[Contribution]:
        values: list[float] = []
        started = time.monotonic()
        for contribution in self._inner(round):
            values.append(float(contribution.tensors[0].flatten()[0]))
            yield contribution
        self._rounds.append({"values": values, "seconds": time.monotonic() - started})
        self.write(finished=False)

    def write(self, finished: bool) -> None:
        state = {"rounds": self._rounds, "refused": dict(self._strategy.refused), "finished": finished}
        self._path.write_text(json.dumps(state), encoding="utf-8")
