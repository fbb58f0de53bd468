"""How much a private step costs over a plain one of the same kind, on several processes of this machine.

    python -m benchmarks.speed.distributed                    1, 2 and 4 gloo processes of one thread each
    python -m benchmarks.speed.distributed --json --out FILE  the same as JSON

The paper's CIFAR-10 network and a batch of 500 in all, so 500 / processes on each. "ddp" is relative to plain
DistributedDataParallel, "fsdp" to plain fully_shard; all four take turns in one run, and a ratio is taken within a
repetition. A step starts and ends at a barrier, so that the slowest process counts; "cpu_ratio" is that of the CPU time
of all processes together. Before any step is timed, the clipped sum over all processes is held against
one-example-at-a-time gradients in float64. With more processes than cores, both sides of a ratio wait for the cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks import show
from benchmarks.speed import oracle
from benchmarks.speed.models import Workload, workload
from halfsilver import PrivacyPlan
from halfsilver._core.distributed import World
from halfsilver._core.sharded import full, unwrapped
from halfsilver._core.tensors import trainable
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients import Performance
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient

Row = dict[str, Any]
Step = Callable[[], None]
KINDS = ("ddp", "fsdp")
_NEXT_TO_NOTHING = 1e-9


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    if args.rank_of:
        _rank(args)
        return 0
    rows = [row for size in args.processes for row in _launch(size, args)]
    result = {"rows": rows, "model": args.model, "batch": 500, "threads": 1, "versions": {"torch": torch.__version__}}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    columns = (
        "model",
        "kind",
        "processes",
        "ratio",
        "min",
        "max",
        "reps",
        "cpu_ratio",
        "seconds",
        "plain_seconds",
        "error",
    )
    print(json.dumps(result)) if args.json else show.show("Private over plain steps", rows, columns)
    return int(any(row["error"] > oracle.TOLERANCE for row in rows))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--model", default="cifar")
    parser.add_argument("--backend", default="auto", help="of halfsilver, for Performance(backend=...)")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the JSON to this file as well")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # the folder of a world that this process is a rank of
    return parser.parse_args(arguments)


def _launch(size: int, args: argparse.Namespace) -> list[Row]:
    """One world, as a user would start it."""
    print(f"{size} processes", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="halfsilver-distributed-") as folder:
        options = ["--rank-of", folder, "--model", args.model, "--backend", args.backend, "--reps", str(args.reps)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        subprocess.run([*torchrun, "-m", "benchmarks.speed.distributed", *options], check=True, stdout=sys.stderr)
        found: list[Row] = json.loads(Path(folder, "rows.json").read_text(encoding="utf-8"))
    return found


def _rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = workload(args.model)
    wanted = oracle.expected(task).total if dist.get_rank() == 0 else {}
    steps, errors = _contenders(task, args.backend, Path(args.rank_of), wanted)
    samples = _measure(steps, args.reps)
    if dist.get_rank() == 0:
        rows = [{"model": task.name, "kind": kind, **_row(samples, kind), "error": errors[kind]} for kind in KINDS]
        Path(args.rank_of, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def _contenders(task: Workload, backend: str, folder: Path, wanted: Any) -> tuple[dict[str, Step], dict[str, float]]:
    steps: dict[str, Step] = {}
    errors: dict[str, float] = {}
    for kind in KINDS:
        steps[f"plain {kind}"] = _plain(task, _wrapped(task, kind))
        ours = Ours(task, _wrapped(task, kind), backend, folder / kind)
        found = ours.clipped_sum()
        errors[kind] = oracle.relative_error(found, wanted) if dist.get_rank() == 0 else 0.0
        steps[f"ours {kind}"] = ours.step
    return steps, errors


def _wrapped(task: Workload, kind: str) -> nn.Module:
    model = task.model()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for layer in model.children():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer)
    fully_shard(model)
    return model


def _plain(task: Workload, model: nn.Module) -> Step:
    """Ordinary training on this process's share of the batch; torch averages the gradients."""
    share = tuple(t[dist.get_rank() :: dist.get_world_size()].contiguous() for t in task.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)

    def step() -> None:
        optimizer.zero_grad()
        task.loss_fn(model, share).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


class Ours:
    """The same by `PrivateGradient`, ledger included, and the update that `Trainer` makes."""

    def __init__(self, task: Workload, model: nn.Module, backend: Any, folder: Path) -> None:
        plan = PrivacyPlan(
            steps=1_000_000,
            sampling_rate=1.0,
            expected_batch_size=task.rows,
            noise_multiplier=1.0,
            max_grad_norm=task.clip,
        )
        self._model, self._rows = unwrapped(model), task.rows
        self._params = trainable(self._model)
        self._optimizer = torch.optim.SGD(self._params, lr=task.lr)
        world = World.current(self._params[0].device)
        ledger = Ledger.open(folder / "ledger.jsonl") if world.leads else None
        self._source = PrivateGradient(
            self._model, task.loss_fn, PrivateData(task.batch), plan,
            ledger=ledger, run_id="speed", performance=Performance(backend=backend), world=world,
        )  # fmt: skip

    def step(self) -> None:
        for p, g in zip(self._params, self._source.release(), strict=True):
            p.grad = g
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def clipped_sum(self) -> dict[str, torch.Tensor]:
        """Over all processes, by the object that is timed, at a noise that no tolerance notices."""
        noise = self._source.out._noise
        self._source.out._noise = _NEXT_TO_NOTHING
        released = self._source.release()
        self._source.out._noise = noise
        names = (name for name, p in self._model.named_parameters() if p.requires_grad)
        return {name: full(g) * self._rows for name, g in zip(names, released, strict=True)}


def _measure(steps: dict[str, Step], reps: int) -> dict[str, torch.Tensor]:
    """Two rows of seconds for each: wall time, and CPU time of all processes."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names = list(steps)
    for rep in range(-1, reps):  # the first repetition warms up, and does not count
        turn = rep % len(names)
        for name in [*names[turn:], *names[:turn]]:
            sample = _sample(steps[name])
            if rep >= 0:
                samples[name].append(sample)
    found = {name: torch.tensor(taken, dtype=torch.float64).T.contiguous() for name, taken in samples.items()}
    for seconds in found.values():
        dist.all_reduce(seconds[1])
    return found


def _sample(step: Step) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    cpu = time.process_time() - cpu
    dist.barrier()
    return time.perf_counter() - wall, cpu


def _row(samples: dict[str, torch.Tensor], kind: str) -> Row:
    (ours, ours_cpu), (plain, plain_cpu) = (samples[f"{who} {kind}"].tolist() for who in ("ours", "plain"))
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    return {
        "cpu_ratio": round(statistics.median(a / b for a, b in zip(ours_cpu, plain_cpu, strict=True)), 4),
        "processes": dist.get_world_size(),
        "ratio": round(statistics.median(ratios), 4),
        "min": round(min(ratios), 4),
        "max": round(max(ratios), 4),
        "reps": len(ratios),
        "seconds": round(statistics.median(ours), 5),
        "plain_seconds": round(statistics.median(plain), 5),
    }


if __name__ == "__main__":
    sys.exit(main())
