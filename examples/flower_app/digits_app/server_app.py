"""The server: `flwr run` begins a run, or goes on with the one that lies in `run-dir`."""

from __future__ import annotations

from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

import halfsilver as hs
from halfsilver.federated import PublicUsers
from halfsilver.federated.flower import Enrolment, MirrorStrategy, Settings
from halfsilver.privacy.strategies import INDEPENDENT
from halfsilver.trainer import StepReport

from . import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    enrolment, data = Enrolment.load(str(config["members"])), Path(str(config["data"]))
    rounds, spare = int(config["rounds"]), int(config["spare-rounds"])
    every, correlated = int(config["every"]), bool(config["correlated"])
    trainer = make_trainer(enrolment.population, rounds, spare, every=every, correlated=correlated)
    (x, y), keys = task.read(data / "public.safetensors")
    trainer.pretrain((x, y), epochs=5, seed=0)  # the start of a new run; one that goes on has its own weights
    users = [(x[of_user], y[of_user]) for of_user in (torch.tensor(keys) == u for u in sorted(set(keys)))]
    strategy = MirrorStrategy(
        trainer,
        enrolment,
        run_dir=str(config["run-dir"]),
        public=PublicUsers(trainer.model, task.loss_fn, users, task.LOCAL, cohort=3, max_norm=task.CLIP),
        settings=Settings(round_seconds=float(config["round-seconds"]), min_online=int(config["min-online"])),
        fit={"test": task.read(data / "test.safetensors")[0], "test_every": 1},
    )
    strategy.start(grid)
    if config["model-file"]:
        save_file(trainer.model.state_dict(), str(config["model-file"]))


def make_trainer(population: int, rounds: int, spare: int, *, every: int = 2, correlated: bool = False) -> hs.Trainer:
    """A user takes part in one of `every` rounds: by secret coins; or in turn, with noise that needs no secret."""
    model, rate = task.model(), 1 / every
    noise = hs.Correlated().fitted(rounds + spare, passes_of=every) if correlated else INDEPENDENT
    plan = hs.PrivacyPlan(
        steps=rounds,
        spare_steps=spare,  # for rounds that a crash interrupts
        sampling_rate=rate,
        expected_batch_size=rate * population,
        noise_multiplier=1.0,
        max_grad_norm=task.CLIP,
        unit="user",
        noise=noise,
    )
    return hs.Trainer(
        model,
        task.loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5),
        plan=plan,
        mirror=hs.FirstOrder(hs.cosine(end=0.5)),
        metrics={"error": task.wrong},
        checkpoint_seconds=0.0,  # rounds are long: save after each
        callbacks=[tell],
    )


def tell(report: StepReport) -> None:
    print(f"round {report.step} of {report.total_steps}, test error {report.metrics['error']:.3f}", flush=True)
