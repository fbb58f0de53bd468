"""Readers of what halfsilver itself writes, and of what its users do: run folders, ledgers, plans, recipes."""

from __future__ import annotations

import json
import struct
import tempfile
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import halfsilver as hs
from benchmarks.robustness.fuzz.damage import Bytes, as_json, damaged, forged, json_file, json_lines, twisted
from benchmarks.robustness.fuzz.run import Target
from halfsilver._core import checkpoint as checkpoints
from halfsilver.privacy.ledger import Budget, Ledger
from halfsilver.report.load import load
from halfsilver.runs.folder import read_json
from halfsilver.runs.verify import verify as verify_run
from halfsilver.tasks import recipes

_PLAN = hs.PrivacyPlan(steps=3, sampling_rate=1.0, expected_batch_size=8, noise_multiplier=5.0)


def ledger() -> Target:
    """With a finished run and an open one, whole and compacted, and the head file beside it."""
    good = {**_ledger_files("whole", compacted=False), **_ledger_files("compacted", compacted=True)}

    def read(folder: Path) -> None:
        for name in ("whole", "compacted"):
            opened = Ledger.open(folder / name, create=False)
            opened.counts()
            opened.verify_head(*opened.head)
            Ledger.open(folder / name, head_file=folder / f"{name}.head", create=False)

    damage = {name: json_file if name.endswith("head") else _ledger_damage for name in good}
    return Target(good=good, damage=damage, read=read)


def _ledger_files(name: str, compacted: bool) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path, head = Path(folder) / name, Path(folder) / f"{name}.head"
        made = Ledger.open(path, budget=Budget(epsilon=9.0, delta=1e-5), head_file=head)
        for run_id in ("done", "open"):
            made.register_run(run_id, _PLAN, block_max=2)
            made.intend(run_id, 2)
            if run_id == "done":
                made.finish(run_id, 2)
        assert made.compact() or not compacted
        return {p.name: p.read_bytes() for p in (path, head)}


def _ledger_damage(content: bytes) -> Bytes:
    return forged(content) | json_lines(content)


def checkpoint() -> Target:
    def read(folder: Path) -> object:
        return checkpoints.read(folder / "checkpoint")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        checkpoints.write(path, {"a": torch.ones(3, 2), "b": torch.tensor(7)}, {"step": 3, "nested": {"x": [1, None]}})
        return Target(good={"checkpoint": path.read_bytes()}, damage={"checkpoint": _checkpoint_damage}, read=read)


def _checkpoint_damage(content: bytes) -> Bytes:
    """Bytes anywhere, the header of the file, or the JSON that halfsilver keeps in it."""
    (size,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    about = json.loads(header["__metadata__"]["halfsilver"])

    def packed(new: bytes) -> bytes:
        return struct.pack("<Q", len(new)) + new + body

    def with_about(new: Any) -> bytes:
        return packed(json.dumps({**header, "__metadata__": {"halfsilver": as_json(new).decode()}}).encode())

    headers = twisted(header).map(lambda new: packed(as_json(new)))
    return twisted(about).map(with_about) | headers | damaged(content)


def verify() -> Target:
    return Target(good=_run_folder(), damage=_RUN_DAMAGE, read=verify_run)


def resume() -> Target:
    """A finished run, which is loaded: config, ledger, metrics and checkpoint with the state of the optimizer."""
    return Target(good=_run_folder(), damage=_RUN_DAMAGE, read=_train)


def report() -> Target:
    return Target(good=_run_folder(), damage=_RUN_DAMAGE, read=load)


_RUN_DAMAGE = {
    "config.json": json_file,
    "statement.json": json_file,
    "metrics.jsonl": json_lines,
    "ledger.jsonl": _ledger_damage,
    "checkpoint.safetensors": _checkpoint_damage,
}


def _loss(model: Any, batch: Any) -> Tensor:
    losses: Tensor = model(batch).square().squeeze(1)
    return losses


def _train(folder: Path) -> None:
    model = torch.nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(adam, [2])
    trainer = hs.Trainer(
        model, _loss, optimizer=adam, scheduler=scheduler, plan=_PLAN, performance=hs.Performance(backend="vmap")
    )
    trainer.fit(torch.ones(8, 2), run_dir=folder, delta=1e-5)


def _run_folder() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        _train(Path(folder))
        return {name: (Path(folder) / name).read_bytes() for name in _RUN_DAMAGE}


def plan() -> Target:
    def read(folder: Path) -> object:
        return hs.PrivacyPlan.from_dict(read_json(folder / "plan.json"))

    return Target(good={"plan.json": json.dumps(_PLAN.to_dict()).encode()}, damage={"plan.json": json_file}, read=read)


def recipe() -> Target:
    def read(folder: Path) -> object:
        return recipes.parse((folder / "mine.toml").read_text(encoding="utf-8"), "mine")

    good = (files(recipes) / "stackexchange-workstation.toml").read_bytes()
    return Target(good={"mine.toml": good}, damage={"mine.toml": _toml_damage}, read=read)


def _toml_damage(content: bytes) -> Bytes:
    """Values of another kind, or characters changed: what is no text never gets to the parser."""
    values = twisted(tomllib.loads(content.decode())).map(_toml)
    return (values | damaged(content)).map(lambda data: data.decode(errors="replace").encode())


def _toml(value: Any) -> bytes:
    """Tables as inline ones, which JSON resembles but for the sign; whatever else is no TOML is a case too."""
    if not isinstance(value, Mapping):
        return as_json(value)
    return b"\n".join(as_json(key) + b" = " + _inline(entry) for key, entry in value.items())


def _inline(value: Any) -> bytes:
    if not isinstance(value, Mapping):
        return as_json(value).replace(b"NaN", b"nan").replace(b"Infinity", b"inf")
    return b"{" + b", ".join(as_json(key) + b" = " + _inline(entry) for key, entry in value.items()) + b"}"


def enrolment() -> Target:
    from halfsilver.federated.flower import Enrolment

    members = [{"name": f"n{i}", "fingerprint": f"{i:064x}", "users": 2, "revoked": bool(i)} for i in range(2)]
    good = {"nodes.json": json.dumps({"members": members}).encode()}
    return Target(good=good, damage={"nodes.json": json_file}, read=lambda f: Enrolment.load(f / "nodes.json"))
