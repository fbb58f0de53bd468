"""Fifty-odd checkpoints that are broken or mean harm: each is a typed error, and none of them is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfsilver as hs
from halfsilver._core import checkpoint
from halfsilver.errors import CheckpointCorrupt, LedgerCorrupt
from halfsilver.trainer import StepReport

BOMB = "exploded"
Header = dict[str, Any]


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (BOMB,))


def trainer(**options: Any) -> hs.Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    plan = hs.PrivacyPlan(steps=50, spare_steps=500, sampling_rate=1.0, expected_batch_size=30, noise_multiplier=30.0)
    return hs.Trainer(
        model,
        lambda m, b: m(b).square().squeeze(1),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10),
        plan=plan,
        average=0.9,
        performance=hs.Performance(backend="vmap", micro_batch_size=30),
        checkpoint_seconds=-1.0,
        **options,
    )


class Stop(Exception):
    pass


def stop(report: StepReport) -> None:
    if report.step == 3:
        raise Stop


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its second checkpoint."""
    folder = tmp_path_factory.mktemp("malice") / "run"
    with pytest.raises(Stop):
        trainer(callbacks=[stop]).fit(torch.ones(30, 4), run_dir=folder, delta=1e-5)
    return folder


# ---- files that are no safetensors, with and without a payload


def saved(write: Callable[[io.BytesIO], Any]) -> Callable[[bytes], bytes]:
    def make(good: bytes) -> bytes:
        buffer = io.BytesIO()
        write(buffer)
        return buffer.getvalue()

    return make


def zipped(buffer: io.BytesIO) -> None:
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))


def sized(text: bytes, size: int | None = None, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if size is None else size) + text + body


FILES: dict[str, Callable[[bytes], bytes]] = {
    "pickle in text form": lambda good: pickle.dumps(Bomb(), protocol=0),
    "pickle": lambda good: pickle.dumps(Bomb(), protocol=2),
    "pickle in the newest form": lambda good: pickle.dumps(Bomb(), protocol=5),
    "torch.save": saved(lambda file: torch.save({"model": Bomb()}, file)),
    "torch.save, old form": saved(lambda file: torch.save(Bomb(), file, _use_new_zipfile_serialization=False)),
    "zip with a pickle": saved(zipped),
    "object array": saved(lambda file: np.save(file, np.array([Bomb()], dtype=object), allow_pickle=True)),
    "program": lambda good: f"#!{sys.executable}\nimport os; os.mkdir({BOMB!r})\n".encode(),
    "pickle behind a header": lambda good: sized(pickle.dumps(Bomb())),
    "pickle behind the tensors": lambda good: good + pickle.dumps(Bomb()),
    "empty": lambda good: b"",
    "seven bytes": lambda good: good[:7],
    "only a length": lambda good: good[:8],
    "half a header": lambda good: good[:200],
    "half the tensors": lambda good: good[:-20],
    "one byte more": lambda good: good + b"\0",
    "header longer than the file": lambda good: sized(good[8:], len(good) * 2),
    "header of 2^62 bytes": lambda good: sized(b"{}", 2**62),
    "header of 2^64-1 bytes": lambda good: sized(b"{}", 2**64 - 1),
    "header of 0 bytes": lambda good: sized(b"", 0, good),
    "zeros": lambda good: bytes(len(good)),
    "ones": lambda good: b"\xff" * len(good),
    "header in another encoding": lambda good: sized("{}".encode("utf-16")),
    "header is a list": lambda good: sized(b"[]"),
    "header is deep": lambda good: sized(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "header says NaN": lambda good: sized(b'{"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', None, b"abcd"),
}


# ---- safetensors whose header lies


def with_header(change: Callable[[Header], Any]) -> Callable[[bytes], bytes]:
    def make(good: bytes) -> bytes:
        size = struct.unpack("<Q", good[:8])[0]
        header = json.loads(good[8 : 8 + size])
        change(header)
        return sized(json.dumps(header).encode(), None, good[8 + size :])

    return make


WEIGHT = "model.weight"  # four float32 values


def doubled(good: bytes) -> bytes:
    """One name twice, with another place the second time."""
    size = struct.unpack("<Q", good[:8])[0]
    entry = b',"model.weight":{"dtype":"F32","shape":[1,4],"data_offsets":[0,16]}}'
    return sized(good[8 : 8 + size].rstrip()[:-1] + entry, None, good[8 + size :])


HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "overlap": with_header(lambda h: h[WEIGHT].update(data_offsets=h["model.bias"]["data_offsets"])),
    "offsets outside": with_header(lambda h: h[WEIGHT].update(data_offsets=[0, 10**9])),
    "offsets backwards": with_header(lambda h: h[WEIGHT].update(data_offsets=h[WEIGHT]["data_offsets"][::-1])),
    "offsets negative": with_header(lambda h: h[WEIGHT].update(data_offsets=[-16, 0])),
    "offsets as texts": with_header(lambda h: h[WEIGHT].update(data_offsets=["0", "16"])),
    "shape too large": with_header(lambda h: h[WEIGHT].update(shape=[2**40, 2**40])),
    "shape negative": with_header(lambda h: h[WEIGHT].update(shape=[-1, -4])),
    "unknown dtype": with_header(lambda h: h[WEIGHT].update(dtype="OBJECT")),
    "dtype of another size": with_header(lambda h: h[WEIGHT].update(dtype="F64")),
    "integers for weights": with_header(lambda h: h[WEIGHT].update(dtype="I32")),
    "name given twice": doubled,
    "no metadata": with_header(lambda h: h.pop("__metadata__")),
    "metadata is a number": with_header(lambda h: h.update(__metadata__=1)),
    "metadata without ours": with_header(lambda h: h.update(__metadata__={"format": "pt"})),
    "our part is a program": with_header(lambda h: h["__metadata__"].update(halfsilver="__import__('os')")),
    "our part is deep": with_header(lambda h: h["__metadata__"].update(halfsilver="[" * 100_000)),
    "our part is a long number": with_header(lambda h: h["__metadata__"].update(halfsilver="9" * 10_000)),
}


# ---- well-formed checkpoints that say what cannot be


def saying(**changes: Any) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        tensors, about = checkpoint.read(path)
        checkpoint.write(path, tensors, {**about, **changes})

    return rewrite


def holding(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        tensors, about = checkpoint.read(path)
        changed = {name.replace("__", "."): t for name, t in changes.items()}
        kept = {name: t for name, t in {**tensors, **changed}.items() if t is not None}
        checkpoint.write(path, kept, about)

    return rewrite


CONTENTS: dict[str, Callable[[Path], None]] = {
    "another version": saying(schema_version=2),
    "step NaN": saying(step=float("nan")),
    "step negative": saying(step=-1),
    "step true": saying(step=True),
    "step beyond the ledger": saying(step=10**9),
    "step as text": saying(step="3"),
    "no head": saying(ledger_head=None),
    "head is a number": saying(ledger_head=7),
    "head is empty": saying(ledger_head=[]),
    "head of words": saying(ledger_head=["a", "b"]),
    "head is an object": saying(ledger_head={"seq": 1}),
    "head of another ledger": saying(ledger_head=[3, "0" * 64]),
    "another run": saying(run_id="run"),
    "another plan": saying(plan_hash="0" * 64),
    "optimizer is a number": saying(optimizer=1),
    "optimizer is empty": saying(optimizer={}),
    "optimizer state is a list": saying(optimizer={"state": [], "param_groups": []}),
    "optimizer groups are a number": saying(optimizer={"state": {}, "param_groups": 3}),
    "optimizer index is a word": saying(optimizer={"state": {"__class__": {}}, "param_groups": []}),
    "scheduler is a number": saying(scheduler=1),
    "scheduler has false pairs": saying(scheduler={"pairs": 3}),
    "average of NaN": saying(average_count=float("nan")),
    "average of infinity": saying(average_count=float("inf")),
    "weights of another shape": holding(model__weight=torch.ones(9, 9)),
    "weights missing": holding(model__weight=None),
    "weights too many": holding(model__more=torch.ones(1)),
    "weights of another dtype": holding(model__weight=torch.ones(1, 4, dtype=torch.int64)),
    "average of another shape": holding(average__0=torch.ones(9)),
    "average missing": holding(average__0=None),
    "average of a word": holding(average__x=torch.ones(1)),
    "optimizer tensor of no parameter": holding(optimizer__99__exp_avg=torch.ones(1)),
    "optimizer tensor of a word": holding(optimizer__x=torch.ones(1)),
}


def rewriting(make: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(make(path.read_bytes()))


CASES = {name: rewriting(make) for name, make in (FILES | HEADERS).items()} | CONTENTS


def test_there_are_fifty_and_the_untouched_one_is_taken(run: Path) -> None:
    assert len(CASES) >= 50
    good = (run / "checkpoint.safetensors").read_bytes()
    assert checkpoint.read(run / "checkpoint.safetensors")[1]["step"] == 2
    assert with_header(lambda h: None)(good)[-20:] == good[-20:]
    with pytest.raises(Stop):
        trainer(callbacks=[stop]).fit(torch.ones(30, 4), run_dir=run, delta=1e-5)


@pytest.mark.parametrize("what", CASES)
def test_a_bad_checkpoint_is_a_typed_error_and_is_not_run(
    run: Path, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = run / "checkpoint.safetensors"
    good = path.read_bytes()
    counted = (run / "ledger.jsonl").read_bytes()
    try:
        CASES[what](path)
        assert path.read_bytes() != good
        with pytest.raises((CheckpointCorrupt, LedgerCorrupt)):
            trainer().fit(torch.ones(30, 4), run_dir=run, delta=1e-5)
    finally:
        path.write_bytes(good)
    assert not Path(BOMB).exists()
    assert (run / "ledger.jsonl").read_bytes() == counted, "a step was taken"
