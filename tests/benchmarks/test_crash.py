"""The crash benchmark at a small size: nothing is lost, and each way of breaking the process is found out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.robustness.disk import Disk, Watch
from halfsilver._core import system

FINDS = {
    "fsync": "under",
    "file-fsync": "under",
    "folder-fsync": "under",
    "entropy": "noise_reused",
    "order": "under",
    "number": "steps_reused",
}


@pytest.mark.nightly
@pytest.mark.parametrize(("noise", "kills", "mutants"), [("independent", 6, 6), ("correlated", 8, 0)])
def test_kills_lose_nothing_and_mutants_are_found_out(noise: str, kills: int, mutants: int) -> None:
    """Some SIGKILLs with power cuts; the full form is `python -m benchmarks.robustness.crash --kills 200 --json`."""
    command = [sys.executable, "-m", "benchmarks.robustness.crash", "--kills", str(kills), "--mutants", str(mutants)]
    command += ["--noise", noise, "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert found["kills"] == kills
    assert not any(found[name] for name in ("under", "noise_reused", "steps_reused", "state_reused", "unreadable"))
    assert found["over_worst"] <= 1
    assert found["releases"] > 20
    assert all(mutant[FINDS[name]] > 0 for name, mutant in found["mutants"].items()), found["mutants"]
    assert found["mutants"].keys() == (FINDS.keys() if mutants else set())


def test_the_disk_keeps_what_was_synced_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    (root / "old").write_bytes(b"old")
    disk = Disk(root)
    monkeypatch.setattr(os, "fsync", Watch(disk.apply).fsync)
    system.make_folder(root / "a" / "b")
    system.write_atomically(root / "a" / "b" / "kept", b"one")
    system.append_durably(root / "a" / "b" / "kept", b" two")
    with (root / "a" / "b" / "kept").open("ab") as file:
        file.write(b" lost")
    (root / "a" / "b" / "new").write_bytes(b"lost")  # no sync at all
    os.replace(root / "old", root / "renamed")  # no sync of the folder
    after = disk.cut(tmp_path / "after").root
    assert sorted(str(p.relative_to(after)) for p in after.rglob("*")) == ["a", "a/b", "a/b/kept", "old"]
    assert (after / "a" / "b" / "kept").read_bytes() == b"one two"
    assert (after / "old").read_bytes() == b"old"
