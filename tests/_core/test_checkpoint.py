"""Checkpoints are data: what is not one is a typed error, and nothing in a file is run."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from halfsilver._core import checkpoint
from halfsilver.errors import CheckpointCorrupt


def test_round_trip_of_tensors_and_json(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2).T, "b": torch.tensor(7), "c": torch.zeros(0, dtype=torch.bfloat16)}
    checkpoint.write(tmp_path / "c", tensors, {"step": 3, "nested": {"x": [1, None]}})
    back, about = checkpoint.read(tmp_path / "c")
    assert all(torch.equal(back[k], tensors[k]) and back[k].dtype == tensors[k].dtype for k in tensors)
    assert about == {"schema_version": 1, "step": 3, "nested": {"x": [1, None]}}


def test_shared_tensors_are_written_twice_rather_than_refused(tmp_path: Path) -> None:
    tied = torch.randn(4)
    checkpoint.write(tmp_path / "c", {"in": tied, "out": tied}, {})
    assert torch.equal(checkpoint.read(tmp_path / "c")[0]["out"], tied)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw-groups"])
def test_optimizer_state_survives(tmp_path: Path, kind: str) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        groups = [{"params": m.parameters(), "lr": 0.1 * (i + 1)} for i, m in enumerate(model)]
        optimizers: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "adam": lambda: torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True),
            "adamw-groups": lambda: torch.optim.AdamW(groups, betas=(0.8, 0.9)),
        }
        return model, optimizers[kind]()

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    model, optimizer = make()
    step(model, optimizer)
    tensors, about = checkpoint.optimizer_parts(optimizer)
    other_model, other = make()
    other_model.load_state_dict(model.state_dict())
    checkpoint.restore_optimizer(other, tensors, json.loads(json.dumps(about)))
    assert torch.equal(step(model, optimizer), step(other_model, other))


def test_a_foreign_optimizer_is_refused() -> None:
    small, large = torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    parts = checkpoint.optimizer_parts(torch.optim.SGD(small.parameters(), lr=1))
    with pytest.raises(CheckpointCorrupt, match="another optimizer"):
        checkpoint.restore_optimizer(torch.optim.SGD(large.parameters(), lr=1), *parts)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("exploded"),))  # type: ignore[return-value]


def header(text: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + body


BROKEN = {
    "empty": b"",
    "noise": bytes(range(256)),
    "pickle": pickle.dumps(Bomb()),
    "torch zip": b"PK\x03\x04" + b"\0" * 100,
    "huge header": struct.pack("<Q", 2**62) + b"{}",
    "not json": header(b"{nope}"),
    "no metadata": header(b"{}"),
    "metadata is no json": header(json.dumps({"__metadata__": {"halfsilver": "{"}}).encode()),
    "metadata is a list": header(json.dumps({"__metadata__": {"halfsilver": "[]"}}).encode()),
    "other version": header(json.dumps({"__metadata__": {"halfsilver": '{"schema_version": 99}'}}).encode()),
    "deep json": header(json.dumps({"__metadata__": {"halfsilver": "[" * 100_000}}).encode()),
    "offsets outside": header(
        json.dumps(
            {
                "__metadata__": {"halfsilver": '{"schema_version": 1}'},
                "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]},
            }
        ).encode()
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_and_malicious_files_are_typed_errors(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c").write_bytes(BROKEN[what])
    with pytest.raises(CheckpointCorrupt):
        checkpoint.read(tmp_path / "c")
    assert not (tmp_path / "exploded").exists()


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointCorrupt):
            checkpoint.read(path)
