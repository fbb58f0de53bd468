"""halfsilver doctor: healthy here, and not where noise, gradients or disk are broken."""

from __future__ import annotations

import contextlib
import errno
import json
import re
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfsilver._core import system
from halfsilver.cli import app as cli
from halfsilver.cli import self_test as doctor
from halfsilver.privacy.entropy import UnsafeSeed
from halfsilver.privacy.gradients import BACKENDS, ClippedSum
from halfsilver.privacy.gradients.vmap import Vmap


def ask(folder: Path) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(cli.app, ["doctor", str(folder), "--json"])
    return done.exit_code, json.loads(done.stdout)


def failed(report: dict[str, Any]) -> set[str]:
    assert report["healthy"] is all(check["ok"] for check in report["checks"])
    return {check["name"] for check in report["checks"] if not check["ok"]}


def test_healthy_here(tmp_path: Path) -> None:
    code, report = ask(tmp_path)
    assert (code, report["healthy"], failed(report)) == (0, True, set())
    assert {f"backend {name}" for name in BACKENDS} <= {check["name"] for check in report["checks"]}
    assert list(tmp_path.iterdir()) == []
    (half,) = [check["found"] for check in report["checks"] if check["name"] == "bfloat16"]
    assert re.match(r"a convolution takes [\d.e+-]+ times as long as in float32 on this processor", half)


def test_a_missing_extra_is_named_and_no_illness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: [*(requires(name) or ()), 'absent-thing>=1; extra == "more"'])
    check = {c.name: c for c in doctor._packages()}["extra more"]
    assert check.ok
    assert check.found == "not installed: pip install 'halfsilver[more]'"


@pytest.mark.parametrize("factor", [0.5, 0.98, 1.02])
def test_noise_of_the_wrong_scale_is_an_illness(factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """n = 320,000, alpha = 1e-6."""
    monkeypatch.setattr(doctor, "BACKENDS", {})
    monkeypatch.setattr("halfsilver.privacy.noise.noise_scale", lambda sigma, clip: factor * sigma * clip)
    code, report = ask(tmp_path)
    assert code == 1
    assert {"noise variance"} <= failed(report) <= {"noise variance", "noise normality"}


def test_noise_that_comes_again_is_an_illness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Again:
        is_private = True

        def words(self, n: int) -> Any:
            return UnsafeSeed(n).words(n)

    monkeypatch.setattr(doctor, "BACKENDS", {})
    monkeypatch.setattr("halfsilver.privacy.mechanism.OsEntropy", Again)
    assert "noise is fresh" in failed(ask(tmp_path)[1])


def test_a_wrong_backend_is_an_illness_and_so_is_a_wrong_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(Vmap):  # type: ignore[misc]
        def clipped_sum(self, *args: Any) -> ClippedSum:
            right = super().clipped_sum(*args)
            return ClippedSum([2 * t for t in right.tensors], right.sensitivity)

    monkeypatch.setattr(doctor, "BACKENDS", {"book": Twice, "vmap": Vmap})
    monkeypatch.setitem(BACKENDS, "book", Twice)
    wrong, right = doctor._backends()
    assert "computes wrong gradients" in wrong.found
    assert (wrong.ok, right.ok) == (False, True)
    monkeypatch.setattr("halfsilver.privacy.gradients.vmap.clip_and_sum", lambda g, clip, *_: _whole(g, clip))
    assert not any(check.ok for check in doctor._backends())


def _whole(gradients: Any, clip: float) -> ClippedSum:
    return ClippedSum([g.double().sum(0) for g in gradients], clip)


def test_a_disk_that_refuses_and_locks_that_do_not_hold_are_illnesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {})
    monkeypatch.setattr(system, "lock_file", lambda path, blocking: contextlib.nullcontext())
    assert failed(ask(tmp_path)[1]) == {"folder"}

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(system, "fsync_file", fail)
    code, report = ask(tmp_path)
    assert (code, failed(report)) == (1, {"folder"})
    assert failed(ask(tmp_path / "absent")[1]) == {"folder"}
