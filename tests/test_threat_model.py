"""The page on threats points to tests that exist, and some limits that it names are shown here."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import halfsilver as hs
from halfsilver._core import checkpoint
from halfsilver.errors import LedgerCorrupt
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.runs import session
from halfsilver.runs.verify import verify
from tests.markdown import ROOT

PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
NAME = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


# ---- the page


@cache
def names_in(path: str) -> set[str]:
    """Names of the tests in a file, those in classes as Class::name."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    boxes = [("", body), *((f"{node.name}::", node.body) for node in body if isinstance(node, ast.ClassDef))]
    return {prefix + f.name for prefix, box in boxes for f in box if isinstance(f, ast.FunctionDef)}


def table(heading: str) -> list[str]:
    """The rows of the table under a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize(("path", "name"), sorted(set(NAME.findall(PAGE))))
def test_what_the_page_names_exists(path: str, name: str) -> None:
    assert (ROOT / path).exists()
    assert name in names_in(path)


@pytest.mark.parametrize("heading", ["Guaranteed", "Not guaranteed"])
def test_every_line_points_to_a_test(heading: str) -> None:
    rows = table(heading)
    assert len(rows) > 15
    assert [row for row in rows if not NAME.search(row.split(" | ")[-1])] == []


def test_every_field_of_the_statement_is_on_the_page(runs: tuple[Path, Path]) -> None:
    named = re.findall(r"`(\w+)`", " ".join(row.split(" | ")[0] for row in table("The statement")))
    assert sorted(named) == sorted(json.loads((runs[0] / "statement.json").read_text()))


# ---- the statement and the limits


def train(folder: Path, *, steps: int = 4, checkpoint_seconds: float | None = None, **options: Any) -> None:
    model = torch.nn.Linear(3, 1)
    plan = hs.PrivacyPlan(steps=steps, sampling_rate=0.2, expected_batch_size=10, noise_multiplier=2.0)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    speed = hs.Performance(backend="vmap")
    made = hs.Trainer(
        model,
        lambda m, b: m(b).square().squeeze(1),
        optimizer=adam,
        plan=plan,
        performance=speed,
        checkpoint_seconds=checkpoint_seconds,
    )
    made.fit(torch.randn(50, 3), run_dir=folder, delta=1e-5, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs on one ledger."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        train(folder / name, ledger=folder / "data.jsonl")
    return folder / "a", folder / "b"


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys(inner)


def test_the_statement_says_who_is_protected_how_and_at_what_cost(runs: tuple[Path, Path]) -> None:
    said = json.loads((runs[1] / "statement.json").read_text())
    assert (said["adjacency"], said["unit"], said["sampler"]) == ("add-remove-one", "example", "poisson")
    assert said["delta"] == said["all_runs_on_this_data"]["delta"] == 1e-5
    assert 0 < said["epsilon_planned"]["pld"] < said["epsilon_planned"]["rdp"]
    assert said["spent_so_far"]["epsilon_pld"] == pytest.approx(said["epsilon_planned"]["pld"])
    total = said["all_runs_on_this_data"]
    assert (total["runs"], total["accountant"]) == (2, "pld")
    assert total["epsilon"] > said["epsilon_planned"]["pld"]


def test_a_checkpoint_holds_nothing_of_the_draw(runs: tuple[Path, Path]) -> None:
    """Weights, what the optimizer keeps, and numbers that the plan or the ledger have as well."""
    tensors, about = checkpoint.read(runs[0] / "checkpoint.safetensors")
    assert {name.split(".")[0] for name in tensors} <= {"model", "optimizer", "average", "mirror"}
    own = {"schema_version", "run_id", "plan_hash", "ledger_head", "step", "average_count", "optimizer", "scheduler"}
    assert set(about) == own


def test_a_run_folder_tells_the_day_and_no_time(runs: tuple[Path, Path]) -> None:
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    files = [json.loads((runs[0] / name).read_text()) for name in ("config.json", "statement.json")]
    about = checkpoint.read(runs[0] / "checkpoint.safetensors")[1]
    found = set(keys([*lines, *files, about]))
    assert {"step", "lr", "released_norm", "plan"} <= found
    assert not [key for key in found if re.search("time|second|elapsed|duration|clock", key)]
    ledger = [json.loads(line) for line in (runs[0].parent / "data.jsonl").read_text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", record["time"]) for record in ledger)


def test_a_joint_rollback_is_seen_by_the_head_file_only(tmp_path: Path) -> None:
    """Run folder with ledger and checkpoint, kept from before a second run on the same data and then put back."""
    folder, ledger, head = tmp_path / "run", tmp_path / "run" / "ledger.jsonl", tmp_path / "elsewhere"
    train(folder, ledger=Ledger.open(ledger, head_file=head))
    shutil.copytree(folder, tmp_path / "before")
    train(tmp_path / "other", ledger=Ledger.open(ledger, head_file=head))
    shutil.rmtree(folder)
    shutil.move(tmp_path / "before", folder)
    assert verify(folder)["statement"]["all_runs_on_this_data"]["runs"] == 1  # the second run is forgotten
    with pytest.raises(LedgerCorrupt, match="was in use"):
        Ledger.open(ledger, head_file=head)


def test_runs_in_folders_of_their_own_do_not_know_each_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tmp_path / name)
        said = json.loads((tmp_path / name / "statement.json").read_text())
        assert said["all_runs_on_this_data"]["runs"] == 1


@pytest.mark.parametrize("private_seconds", [0.0, 1000.0])
@pytest.mark.parametrize(
    ("options", "saved_at"), [({}, [0, 1, 1, 4, 7, 8]), ({"checkpoint_seconds": 5.0}, [0, 1, 1, 6, 8])]
)
def test_checkpoints_do_not_depend_on_the_time_of_private_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    saved_at: list[int],
    private_seconds: float,
) -> None:
    """By a clock on which made-up rows take a second and a checkpoint takes 5 % of that, whatever private rows take."""
    now, steps, write, release = [0.0], list[int](), checkpoint.write, PrivateGradient.release

    def noted(path: Path, tensors: Any, about: Any) -> None:
        if "step" in about:  # else the weights of the finished run
            steps.append(about["step"])
        now[0] += 0.05
        write(path, tensors, about)

    def slow(self: PrivateGradient) -> Any:
        now[0] += private_seconds
        return release(self)

    monkeypatch.setattr(checkpoint, "write", noted)
    monkeypatch.setattr(PrivateGradient, "release", slow)
    monkeypatch.setattr(PrivateGradient, "_seconds_of_a_step", lambda self: 1.0)
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now[0]))
    train(tmp_path / "run", steps=8, **options)
    assert steps == saved_at
