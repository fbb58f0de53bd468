"""The library on a pretended `cuda` device, which refuses what the real one refuses. No real one was ever used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfsilver as hs
from halfsilver.errors import ConfigError
from tests.device import flows
from tests.device.run import CLEAN, CLOSE
from tests.markdown import ROOT

Found = dict[str, dict[str, Any]]
MIXED = "at least two devices"
SOURCE = Path(__file__).parent / "pretended.cpp"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    """Runs `tests.device.run` in a process of its own; what it found, by name."""
    compiler = shutil.which("g++")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("g++ is missing, which compiles the pretended device. On CI it has to be installed.")
        pytest.skip("g++ is missing, which compiles the pretended device")
    library, torch_ = tmp_path_factory.mktemp("device") / "pretended.so", Path(torch.__file__).parent
    options = ["-O1", "-std=c++20", "-fPIC", "-shared", f"-I{torch_}/include", f"-L{torch_}/lib"]
    linked = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_}/lib"]
    subprocess.run([compiler, *options, str(SOURCE), *linked, "-o", str(library)], check=True)

    def in_process(what: str, *names: str) -> Found:
        command = [sys.executable, "-m", "tests.device.run", str(library), what, *names]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return {line.pop("name"): line for line in map(json.loads, done.stdout.splitlines())}

    return in_process


@pytest.fixture(scope="module")
def found(run: Callable[..., Found]) -> Found:
    """What the flows of every push find, in one process."""
    return run("flows", *(flow.__name__ for flow in [*flows.ESSENTIAL, *flows.OUT_OF_RANGE]))


@pytest.fixture(scope="module")
def device(run: Callable[..., Found]) -> Found:
    return run("device")


@pytest.mark.parametrize("flow", [*flows.ESSENTIAL, *flows.OUT_OF_RANGE], ids=lambda flow: flow.__name__)
def test_a_run_on_the_device_ends_with_the_weights_of_the_cpu(flow: flows.Flow, found: Found) -> None:
    result = found[flow.__name__]
    assert "error" not in result, result["error"]
    assert result["distance"] <= CLOSE


@pytest.mark.nightly
def test_so_does_one_with_adapters(run: Callable[..., Found]) -> None:
    result = run("flows", "lora")["lora"]
    assert "error" not in result, result["error"]
    assert result["distance"] <= CLOSE


def test_the_pretended_device_refuses_what_the_real_one_refuses(device: Found) -> None:
    said = device["refusals"]["found"]
    assert all(MIXED in said[name] for name in ("add", "mm", "cat", "in place"))
    assert "can't convert cuda:0 device type tensor to numpy" in said["numpy"]
    assert "Expected a 'cuda' device type for generator" in said["generator"]
    assert {name: said[name] for name in ("number", "copy", "index", "view")} == {
        "number": "12.0", "copy": "6.0", "index": "cuda:0", "view": "0.0"
    }  # fmt: skip


def test_kernels_are_timed_when_the_device_has_finished(device: Found) -> None:
    assert device["waiting"]["found"] == {"read": True, "at work": False}


def test_without_the_check_a_label_out_of_range_ends_the_use_of_the_device(device: Found) -> None:
    assert "device-side assert" in device["unchecked"]["found"]


def test_a_loss_that_one_record_could_make_end_the_process_is_refused_or_told_of(device: Found) -> None:
    told = device["told"]["found"]
    assert told["probabilities"].startswith("UnsupportedLayer: On a GPU, binary_cross_entropy ends the process")
    assert "The range of some whole numbers of a record is not known" in told["picky"]
    assert told["plain"] == "6", "its weights, and no word"


@pytest.mark.nightly
def test_tensors_that_stay_on_the_cpu_are_found_and_clean_runs_raise_no_alarm(run: Callable[..., Found]) -> None:
    planted = run("faults")
    seen = [MIXED in result.get("error", "") or result.get("distance", 0.0) > CLOSE for result in planted.values()]
    clean = run("clean", "users", "bad_labels", "bad_tokens")
    alarms = [not result.get("distance", 1.0) <= CLOSE for result in clean.values()]
    sys.stdout.write(f"planted: {sum(seen)} of {len(seen)} found; clean: {sum(alarms)} of {len(alarms)} alarms\n")
    assert (sum(seen), len(seen), sum(alarms), len(alarms)) == (10, 10, 0, CLEAN)


# ---- devices that are refused, here without any


OTHERS = r"^Expected device='{}' to be 'cpu' or 'cuda'. This version trains on no other device."


def test_a_device_that_is_not_there_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^Expected device='cuda' to be 'cpu', because torch finds no CUDA device here.$"
    ):
        _trainer("cuda")


@pytest.mark.parametrize("device", ["mps", "mps:0", "xpu", "gpu"])
def test_other_devices_are_refused_before_anything_is_moved(device: str) -> None:
    with pytest.raises(ConfigError, match=OTHERS.format(device)):
        _trainer(device)


def _trainer(device: str) -> hs.Trainer:
    model = nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hs.Trainer(model, flows.loss, optimizer=optimizer, plan=flows.plan(), device=device)


def test_a_model_on_another_device_is_refused_wherever_private_rows_are_used(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 3)).to("meta")  # as on mps, which this machine lacks
    private, public = flows.private_of(flows.TABLE), flows.public_of(flows.TABLE)
    with pytest.raises(ConfigError, match=OTHERS.format("meta")):
        flows.trainer(model, "meta")
    with pytest.raises(ConfigError, match=OTHERS.format("meta")):
        hs.head(model, flows.loss, private, public, epsilon=4, delta=1e-4, population=40, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=OTHERS.format("meta")):
        hs.private_clip_norm(
            model, flows.loss, private, population=40, noise_multiplier=4.0, ledger=tmp_path / "ledger.jsonl"
        )
    assert not (tmp_path / "head").exists()
