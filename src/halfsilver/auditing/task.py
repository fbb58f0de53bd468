"""The audit of a benchmark task: its model, loss, plan and map, on public rows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from halfsilver.auditing.report import AuditReport, audit
from halfsilver.mirror.rows import PublicRows
from halfsilver.study.arena import make_plan
from halfsilver.study.method import PDA, WARM
from halfsilver.study.problem import Setting
from halfsilver.study.run import Job, make_trainer
from halfsilver.study.start import new_model
from halfsilver.tasks.named import study_of_task


def audit_of_task(task: str, *, data: Path, recipe: str, epsilon: float | None, rows: int, **asked: Any) -> AuditReport:
    """`audit` of the trainer with which ``halfsilver run TASK`` would train, on the first public `rows`.

    Where users train themselves their map has public users for a gradient, which the bank has no share in, so the plain
    one is audited.
    """
    study = study_of_task(task, data=data, recipe=recipe, epsilon=epsilon, delta=asked["delta"])
    made, problem, nowhere = study.request.recipe, study.source(), Path()
    plan = make_plan(made, problem.population, study.request.epsilon, asked["delta"])
    method, grid = PDA if made.local is None else WARM, made.grid
    job = Job(
        method=method,
        seed=0,
        setting=Setting(grid.warm[len(grid.warm) // 2], grid.middle_end),
        folder=nowhere,
        start=nowhere,
        ledger=nowhere,
        delta=asked["delta"],
    )
    trainer = make_trainer(new_model(problem, 0), problem, made, job, plan)
    shown = PublicRows(problem.public)
    some = shown.batch(torch.arange(min(rows, len(shown))), torch.device("cpu"))
    return audit(trainer, some, problem.public if method.has_mirror else None, local=made.local, **asked)
