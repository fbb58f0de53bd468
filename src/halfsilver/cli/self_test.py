"""A self-test of the installation, in seconds: packages, gradient backends, the noise of real releases, the disk."""

from __future__ import annotations

import math
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from halfsilver._core import system
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Tensors, flatten, norm, take_rows, trainable
from halfsilver.errors import HalfsilverError, MissingExtra, RunFolderBusy
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients import BACKENDS, Performance, make_backend
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.plan import PrivacyPlan

ALPHA = 1e-6  # of each of the three tests of the noise
_CLIP, _CLOSE = 0.1, 2e-2  # clip norm of the gradients to compare, and how many of these they may be apart
_TURNS = 5  # of each precision
_WIDTH = 400  # of the layer whose 160,000 weights receive noise


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding. What may be missing, such as an extra, is fine when it is missing."""

    name: str
    ok: bool
    found: str


def examine(folder: Path) -> list[Check]:
    """All checks, in the order of the module's title. Leaves nothing in `folder`, and reads no data but its own."""
    return [*_packages(), *_backends(), _half_precision(), *_disk_and_noise(folder)]


# ---- packages


def _packages() -> Iterator[Check]:
    yield Check(name="python", ok=True, found=platform.python_version())
    yield Check(name="halfsilver", ok=True, found=version("halfsilver"))
    groups: dict[str, list[str]] = {}
    for line in requires("halfsilver") or ():
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        groups.setdefault(extra[1] if extra else "", []).append(re.split(r"[^\w.-]", line)[0])
    for name in groups.pop("", []):
        yield Check(name=name, ok=_version(name) is not None, found=_version(name) or "not installed")
    for extra_name, names in groups.items():
        found = {name: _version(name) for name in names}
        shown = ", ".join(f"{name} {number}" for name, number in found.items())
        lacking = f"not installed: pip install 'halfsilver[{extra_name}]'"
        yield Check(name=f"extra {extra_name}", ok=True, found=lacking if None in found.values() else shown)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# ---- gradients


def _backends() -> Iterator[Check]:
    with own_randomness(0, []):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))
        batch = torch.randn(4, 1, 5, 5), torch.arange(4) % 3
    expected = _one_by_one(model, batch)
    for name in BACKENDS:
        ok, found = True, ""
        try:
            backend = make_backend(Performance(backend=name), model, _loss, batch)  # type: ignore[arg-type]
            sums = backend.clipped_sum(batch, _CLIP).tensors
            apart = norm([a - b for a, b in zip(sums, expected, strict=True)]) / _CLIP
            ok, found = apart <= _CLOSE, f"{apart:.1g} clip norms from autograd, one example at a time"
        except MissingExtra as error:
            found = str(error)
        except HalfsilverError as error:
            ok, found = False, str(error)
        yield Check(name=f"backend {name}", ok=ok, found=found)


def _half_precision() -> Check:
    """Processors without instructions for bfloat16 emulate it. The median of 5 turns each, on one layer."""
    taken: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    with own_randomness(0, []):
        layer, images = nn.Conv2d(32, 32, 3), torch.randn(16, 32, 24, 24)
    for _ in range(_TURNS):
        for dtype, seconds in taken.items():
            started = time.perf_counter()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
                out = layer(images)
            out.float().sum().backward()
            seconds.append(time.perf_counter() - started)
    ratio = statistics.median(taken[torch.bfloat16]) / statistics.median(taken[torch.float32])
    advice = "leave Performance(autocast=) out" if ratio > 1 else "Performance(autocast=torch.bfloat16) saves time"
    found = f"a convolution takes {ratio:.2g} times as long as in float32 on this processor: {advice}"
    return Check(name="bfloat16", ok=True, found=found)


def _loss(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _one_by_one(model: nn.Module, batch: Any) -> Tensors:
    """The clipped sum with nothing of ours in it."""
    total = [torch.zeros_like(p) for p in trainable(model)]
    for i in range(len(batch[0])):
        own = torch.autograd.grad(_loss(model, take_rows(batch, slice(i, i + 1))).sum(), trainable(model))
        factor = min(1.0, _CLIP / norm(own))
        total = [t + factor * g for t, g in zip(total, own, strict=True)]
    return total


# ---- disk and noise


def _disk_and_noise(folder: Path) -> Iterator[Check]:
    try:
        with tempfile.TemporaryDirectory(prefix=".halfsilver-doctor-", dir=folder) as name:
            yield _durable(Path(name))
            yield from _noise(Path(name))
    except (HalfsilverError, OSError) as error:
        yield Check(name="folder", ok=False, found=f"{folder} is not fit for a ledger: {error}")


def _durable(folder: Path) -> Check:
    """The three things that a ledger asks of a file system, by the functions that it calls."""
    path, started = folder / "file", time.monotonic()
    system.write_atomically(path, b"one,")
    system.append_durably(path, b"two")
    seconds = time.monotonic() - started
    excludes = False
    with system.lock_file(folder / "lock", blocking=False):
        try:
            with system.lock_file(folder / "lock", blocking=False):
                pass
        except RunFolderBusy:
            excludes = True
    ok = excludes and path.read_bytes() == b"one,two"
    return Check(
        name="folder", ok=ok, found=f"fsync returns ({seconds * 1e3:.1f} ms), locks {'' if ok else 'do not '}hold"
    )


def _noise(folder: Path) -> Iterator[Check]:
    """Two releases of a data set without records, through ledger and all, are noise and nothing else."""
    model = nn.Linear(_WIDTH, _WIDTH, bias=False)
    plan = PrivacyPlan(steps=2, sampling_rate=0.5, expected_batch_size=8, noise_multiplier=1.3, max_grad_norm=0.7)
    source = PrivateGradient(
        model,
        lambda model, batch: model(batch).square().mean(1),
        PrivateData(torch.zeros(0, _WIDTH)),
        plan,
        ledger=Ledger.open(folder / "ledger"),
        run_id="doctor",
        performance=Performance(backend="vmap", micro_batch_size=4),
    )
    scale = plan.noise_multiplier * plan.max_grad_norm / plan.expected_batch_size
    draws = [(flatten(source.release()).double() / scale).numpy() for _ in range(2)]
    values = np.concatenate(draws)
    n, squares = len(values), float((values**2).sum())
    tests = {
        "mean": 2 * stats.norm.sf(abs(values.mean()) * math.sqrt(n)),
        "variance": 2 * min(stats.chi2.cdf(squares, n), stats.chi2.sf(squares, n)),
        "normality": stats.kstest(values, "norm").pvalue,
    }
    for name, p in tests.items():
        yield Check(name=f"noise {name}", ok=bool(p > ALPHA), found=f"p = {p:.2g} (n = {n:,}, alpha = {ALPHA:g})")
    shared = float((draws[0] == draws[1]).mean())
    yield Check(name="noise is fresh", ok=shared < 0.01, found=f"{shared:.1%} of two draws are the same")
