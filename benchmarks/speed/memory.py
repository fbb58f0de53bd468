"""Peak memory of a step above that of the idle process, each measurement in a fresh process.

    python -m benchmarks.speed.memory --model cifar --contender halfsilver

The idle process holds model and data, and the contender has trained a tiny model in it, because libraries load parts of
themselves when they are first used. Whatever a contender allocates from then on counts: its own set-up and two steps.
Linux only: the kernel's high-water mark is reset through /proc.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.contenders import CONTENDERS, Contender, Options
from benchmarks.speed.models import workload
from benchmarks.speed.race import build

_STEPS = 2
_SECONDS = 900


def peak_above_idle(function: Callable[[], object]) -> float:
    """MB by which the resident memory of this process rose at most while `function` ran."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark starts again from here
    idle = _status_kb("VmRSS")
    function()
    return (_status_kb("VmHWM") - idle) / 1024


def _status_kb(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1])


def of_contender(model: str, contender: str, options: Options) -> float:
    """Of this process, which must not have trained before: freed memory need not go back to the system."""
    task, entry = workload(model), CONTENDERS[contender]
    _train(build(contender, workload("tiny"), options))
    network = task.model(entry.recurrent())
    return peak_above_idle(lambda: _train(entry.build(task, network, options)))


def _train(contender: Contender) -> None:
    for _ in range(_STEPS):
        contender.step()


def in_fresh_process(model: str, contender: str, options: Options, threads: int) -> dict[str, Any]:
    """{"peak_mb": ...}, or {"reason": ...} where the contender cannot run."""
    command = [sys.executable, "-m", "benchmarks.speed.memory", "--model", model, "--contender", contender]
    command += ["--backend", options.backend, "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=_SECONDS)
    if done.returncode:
        return {"reason": (done.stderr.strip().splitlines() or ["no message"])[-1][:400]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--contender", required=True, choices=CONTENDERS)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peak = of_contender(args.model, args.contender, Options(backend=args.backend))
    print(json.dumps({"peak_mb": round(peak, 1)}))


if __name__ == "__main__":
    main()
