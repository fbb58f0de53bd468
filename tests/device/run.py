"""Runs in a process of its own, in which `cuda` is a device: `python -m tests.device.run LIBRARY WHAT [NAMES]`.

Prints one line of JSON for each run: its name, and the error or the distance from the same run on the CPU.
"""

from __future__ import annotations

import ctypes
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

CLOSE = 1e-5
CLEAN = 100


def refusals() -> dict[str, str]:
    """What the pretended device says to that which the real one refuses, or does otherwise than the CPU."""
    import torch

    here, there = torch.ones(2, 3), torch.ones(2, 3, device="cuda")
    tried: dict[str, Callable[[], Any]] = {
        "add": lambda: there + here,
        "mm": lambda: there @ here.T,
        "cat": lambda: torch.cat([there, here]),
        "in place": lambda: here.add_(there),
        "numpy": lambda: there.numpy(),
        "generator": lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
        "number": lambda: float((there + torch.tensor(1.0)).sum()),
        "copy": lambda: float(torch.zeros(2, 3).copy_(there).sum()),
        "index": lambda: there[torch.tensor([0])].device,
        "view": lambda: float(torch.stack([*there.clone()[1:].zero_()]).sum()),
    }
    return {name: _said(function) for name, function in tried.items()}


def waiting() -> dict[str, bool]:
    """Whether the clock of the kernels was ever read while the device was at work."""
    import torch

    import halfsilver as hs
    from halfsilver.privacy.gradients import base
    from tests.device import flows

    pending: list[bool] = []

    def read() -> float:
        pending.append(torch.ops.pretended.pending())
        return float(len(pending))

    flows.forget_timings()
    measured = flows.trainer(flows.lstm_model(), "cuda", flows.text_loss, performance=hs.Performance())
    with mock.patch.object(base, "time", SimpleNamespace(perf_counter=read, thread_time=read)):
        flows.trained(measured, flows.private_of(flows.TEXT))
    return {"read": bool(pending), "at work": any(pending)}


def told() -> dict[str, str]:
    """What a loss is told that a record could make end the process."""
    from torch.nn import functional as F

    from tests.device import flows

    def probabilities(model: Any, batch: Any) -> Any:
        right = (batch[1] == 0).float()
        return F.binary_cross_entropy(model(batch[0])[:, 0].sigmoid(), right, reduction="none")

    def picky(model: Any, batch: Any) -> Any:
        if bool((batch[1] > 2).any()):
            raise ValueError("no such class")
        return flows.loss(model, batch)

    def run(loss: Any) -> str:
        lines = io.StringIO()
        handler = logging.StreamHandler(lines)
        logging.getLogger("halfsilver").addHandler(handler)
        said = _said(
            lambda: len(flows.trained(flows.trainer(flows.table_model(), "cuda", loss), flows.private_of(flows.TABLE)))
        )
        logging.getLogger("halfsilver").removeHandler(handler)
        return said + lines.getvalue()

    return {"probabilities": run(probabilities), "picky": run(picky), "plain": run(flows.loss)}


def unchecked() -> str:
    """What a label out of range does where ranges are not checked."""
    from halfsilver.privacy.ranges import Ranges
    from tests.device import flows

    with mock.patch.object(Ranges, "inside", lambda self, batch: batch):
        return _said(lambda: flows.bad_labels("cuda"))


@contextmanager
def _on_cpu(module: Any) -> Iterator[None]:
    """A module that makes its tensors on the CPU, whatever device it names."""
    import torch

    class Torch:
        def __getattr__(self, name: str) -> Any:
            found = getattr(torch, name)
            if name in ("zeros", "full", "empty", "arange", "randint"):
                return lambda *args, device=None, **options: found(*args, **options)
            return found

    with mock.patch.object(module, "torch", Torch()):
        yield


def faults() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Ten places at which a tensor stays on the CPU, each with a run that comes by."""
    import torch

    from halfsilver import probing
    from halfsilver.features import frozen
    from halfsilver.mirror.rows import PublicRows
    from halfsilver.privacy import batches, noise, released_metrics
    from halfsilver.privacy.gradients import base
    from halfsilver.privacy.gradients.book import backend, tune
    from halfsilver.privacy.users import engine

    def use(contribution: Any, adding: Any) -> None:
        contribution.weighted_sum(torch.full((contribution.rows,), 0.5, dtype=torch.float64), adding)

    def left(function: Any, batch: Any) -> Any:
        return batch

    def on_cpu(rows: Any, index: Any, device: Any, dtype: Any = None) -> Any:
        return batch_of(rows, index, torch.device("cpu"), dtype)

    def added(total: Any, *args: Any, **options: Any) -> Any:
        return on_grid(total.cpu(), *args, **options)

    def factors(*args: Any, **options: Any) -> Any:
        return clip_factors(*args, **options).cpu()

    batch_of, on_grid, clip_factors = PublicRows.batch, noise.on_grid, base.clip_factors
    return {
        "tune": ("lstm", lambda: mock.patch.object(tune, "_use", use)),
        "totals": ("mlp", lambda: _on_cpu(backend)),
        "clip factors": ("lstm", lambda: mock.patch.object(backend, "clip_factors", factors)),
        "private rows": ("mlp", lambda: mock.patch.object(batches, "map_batch", left)),
        "public rows": ("whitened_cnn", lambda: mock.patch.object(PublicRows, "batch", on_cpu)),
        "features": ("head_rows_on_cpu", lambda: mock.patch.object(frozen, "map_batch", left)),
        "rows of users": ("bad_labels_of_users", lambda: mock.patch.object(engine, "map_batch", left)),
        "labels for a head": ("head_rows_on_device", lambda: _on_cpu(probing)),
        "groups": ("release", lambda: _on_cpu(released_metrics)),
        "noise": ("mlp", lambda: mock.patch.object(noise, "on_grid", added)),
    }


def _said(function: Callable[[], Any]) -> str:
    try:
        return str(function())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def say(name: str, **found: Any) -> None:
    sys.stdout.write(json.dumps({"name": name, **found}) + "\n")
    sys.stdout.flush()


def compare(name: str, flow: str, seed: int = 3) -> None:
    from tests.device import flows

    try:
        say(name, distance=flows.distance(flows.FLOWS[flow], seed))
    except Exception as error:
        say(name, error=f"{type(error).__name__}: {error}")


def main(library: str, what: str, *names: str) -> None:
    ctypes.CDLL(library)  # before torch looks for devices
    import torch

    from tests.device import pretended

    torch.set_num_threads(1)
    pretended.install(Path(library))
    if what == "flows":
        for name in names:
            compare(name, name)
    elif what == "faults":
        for name, (flow, plant) in faults().items():
            with plant():
                compare(name, flow)
    elif what == "clean":
        for number in range(CLEAN):
            compare(str(number), names[number % len(names)], number)
    else:
        for look in (refusals, waiting, told, unchecked):  # after the last one, the device is of no use
            say(look.__name__, found=look())


if __name__ == "__main__":
    main(*sys.argv[1:])
