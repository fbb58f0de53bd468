"""One audited run of a trainer: the same model, loss, plan and map with a bank beside them, through `Trainer.fit`."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfsilver._core.distributed import World
from halfsilver._core.tensors import Batch, take_rows, trainable
from halfsilver.auditing.bank import Banked, Layout, losses, public_losses, public_records
from halfsilver.auditing.observe import Kind, Observation, Replay
from halfsilver.auditing.watch import Watch, WatchedMap, WatchedRecords
from halfsilver.errors import require
from halfsilver.mirror.rows import PublicRows
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.strategies import Correlated
from halfsilver.runs.folder import RunFolder
from halfsilver.trainer import Trainer

Run = Callable[[PrivacyPlan, Path, Layout, int | None], Observation]  # (plan, folder, layout, unsafe_seed)
Private = Callable[[WatchedRecords], Any]  # what `Trainer.fit` is given for private data

REPLAYED = (Kind.IN, Kind.CANCELLING, Kind.BROKEN)
_REPLAY_STEPS, _REPLAY_CANARIES, _REPLAY_ROWS, _SEED = 12, 20, 20, 7


def all_rows(data: Any) -> Batch:
    """Every row of a public data set, as tensors."""
    rows = PublicRows(data)
    return rows.batch(torch.arange(len(rows)), torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Audited:
    """A `trainer` that is never run itself, `rows` for it to train on, and public rows for its map, all as tensors."""

    trainer: Trainer
    rows: Batch
    public: Batch | None = None
    private: Private = PrivateData.of
    name: str = "trainer"

    def __call__(self, plan: PrivacyPlan, folder: Path, layout: Layout, unsafe_seed: int | None = None) -> Observation:
        """Run the trainer's own code on rows and canaries; the optimizer alone is exchanged, for plain SGD."""
        trainer, rows = self.trainer, self.rows if unsafe_seed is None else take_rows(self.rows, slice(_REPLAY_ROWS))
        curvature = 0.0 if self.public is None else 1.0
        public_loss_fn = trainer.public_loss_fn or trainer.loss_fn
        model = Banked(copy.deepcopy(trainer.model), trainer.loss_fn, public_loss_fn, layout, curvature)
        columns, order = layout.records(rows, plan.max_grad_norm)
        watch = Watch(order, len(layout.places), lambda _: model.numbers(), trainable(model.inner), model)
        records = WatchedRecords(columns, watch, layout.example(rows, plan.max_grad_norm))
        mirror = WatchedMap(trainer.mirror, model.bank_weights(), curvature)
        again = self._trainer(model, plan, mirror, unsafe_seed)
        public = None if self.public is None else public_records(self.public)
        with watch.watching():
            again.fit(self.private(records), public, run_dir=folder, check_usable=False)
        if World.current(torch.device("cpu")).size > 1:
            watch.forget_first()
        banks = [np.zeros((2, layout.width)), *watch.numbers]
        return Observation(
            loop=self.name,
            plan=plan,
            scores=mirror.scores(banks, _lr(trainer)) * plan.expected_batch_size / plan.max_grad_norm,
            kinds=layout.kinds,
            reads=np.stack(watch.read_for)[None],
            places=layout.places,
            intents=intents(RunFolder(folder).ledger),
            releases=len(watch.numbers),
            rest=watch.rest if mirror.elementwise else "",  # elsewhere one released number may move all others
            fixed=watch.fixed,
            unread=mirror.unread,
            changed=mirror.changed,
        )

    def _trainer(self, model: Banked, plan: PrivacyPlan, mirror: WatchedMap, unsafe_seed: int | None) -> Trainer:
        trainer = self.trainer
        require(isinstance(trainer.performance.backend, str), "backend", trainer.performance.backend, "to be a name")
        return replace(
            trainer,
            model=model,
            loss_fn=losses,
            optimizer=torch.optim.SGD(trainable(model), lr=_lr(trainer)),
            plan=plan,
            mirror=mirror,
            public_loss_fn=public_losses,
            scheduler=None,
            average=None,
            metrics={},
            callbacks=(),
            skip_public_copies=False,  # the rows may be the public ones, and are there to be trained on
            unsafe_seed=unsafe_seed,
            progress=False,
            checkpoint_seconds=float("inf"),
        )


def _lr(trainer: Trainer) -> float:
    return float(trainer.optimizer.param_groups[0]["lr"])


def intents(ledger: Path) -> int:
    """The steps that a ledger counts, from its lines and without the code that wrote them."""
    lines = (json.loads(line) for line in ledger.read_text().splitlines())
    return sum(line["count"] for line in lines if line["type"] == "intent")


def observe(run: Run, plan: PrivacyPlan, folder: Path, layout: Layout, *, replay: bool = True) -> Observation:
    """One run for instruments A and B, and if asked short ones on neighbouring data for instrument C."""
    seen = run(plan, folder / "run", layout, None)
    if not replay:
        return seen
    leavers = [kind for kind in REPLAYED if kind in layout.kinds]
    return replace(seen, replays=tuple(replayed(run, plan, folder / kind.name, layout, kind) for kind in leavers))


def replayed(run: Run, plan: PrivacyPlan, folder: Path, layout: Layout, leaver: Kind) -> Replay:
    """Two runs on the same random numbers: with the record of kind `leaver` at the end of the data, and without it.

    Batches of half the data, so that it is read in some of a few steps and not in others; of records that take turns,
    in every other step. These keep their places, because the one that leaves is the last.
    """
    noise, rate = plan.noise, min(1.0, max(0.5, plan.sampling_rate))
    if isinstance(noise, Correlated):
        noise = replace(noise, separation=min(noise.participation(plan.max_releases).separation, math.floor(1 / rate)))
    short = replace(plan, steps=_REPLAY_STEPS, spare_steps=0, sampling_rate=rate, noise=noise)
    small = replace(layout, canaries=_REPLAY_CANARIES, last=leaver)
    with_it = run(short, folder / "with", small, _SEED)
    without = run(short, folder / "without", replace(small, absent=True), _SEED)
    difference = (with_it.scores - without.scores).reshape(len(with_it.scores), -1)
    facts = ("rest", "fixed", "intents", "releases")
    return Replay(
        leaver=leaver,
        reach=np.linalg.norm(difference, axis=1),
        read=with_it.reads[:, :, -1].sum(0) > 0,
        differing=tuple(name for name in facts if getattr(with_it, name) != getattr(without, name)),
    )
