"""One run of a finished study again, at a setting that its search did not choose: was the setting to blame?

    python -m benchmarks.studies.again STUDY --method pda --lr 0.06 --alpha-end 0.995 [--seed 0] [--out FILE]

The same start, rows, plan and test set as the run of that method and seed, beside which it is printed; sampling and
noise are fresh. The run goes to the folder STUDY/again and to the study's ledger, and is resumed where it was killed.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs.folder import read_json, versions, write_json
from halfsilver.study.arena import Arena
from halfsilver.study.method import REGISTERED, registered
from halfsilver.study.problem import Setting
from halfsilver.study.run import Job, run
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource


def again(study: Path, data: Path, method: str, seed: int, setting: Setting) -> dict[str, Any]:
    about = read_json(study / "study.json")
    recipe, _ = load(about["task"], about["recipe"]["name"])
    job = Job(
        method=registered(method),
        seed=seed,
        setting=setting,
        folder=study / "again" / f"{method}-seed-{seed}-{setting.label}",
        start=study / "start" / f"seed-{seed}.safetensors",
        ledger=study / "ledger.jsonl",
        delta=about["delta"],
    )
    problem = TaskSource.of(about["task"], data, about["options"])()
    arena = Arena(problem=problem, plan=PrivacyPlan.from_dict(about["plan"]), spends=True)
    run(arena, recipe, job, progress=None)
    runs = {
        "again": read_json(job.result),
        "study": read_json(study / "runs" / f"{method}-seed-{seed}" / "result.json"),
    }
    shown = ("setting", "final", "curve")
    about = {"task": about["task"], "epsilon": about["epsilon"], "delta": about["delta"], "versions": versions()}
    return {**about, "method": method, "seed": seed, **{k: {n: r[n] for n in shown} for k, r in runs.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--method", choices=sorted(m.name for m in REGISTERED.values() if m.trains), required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--alpha-end", type=float, help="for methods that mix in public gradients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = again(args.study, args.data, args.method, args.seed, Setting(args.lr, args.alpha_end))
    if args.out is not None:
        write_json(args.out, result)
    print(json.dumps({which: {n: result[which][n] for n in ("setting", "final")} for which in ("study", "again")}))


if __name__ == "__main__":
    main()
