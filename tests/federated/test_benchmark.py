"""The benchmark of federated rounds measures what it says; small, so that nothing is said about speed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks.federated import __main__ as federated
from benchmarks.federated import clients, core, flower, population, stackoverflow_file
from halfsilver.federated import InProcess, PrivateUsers
from halfsilver.privacy.users import engine
from halfsilver.tasks import stackexchange


def test_json_of_core_and_clients(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "federated.json"
    arguments = ["--tiny", "--parts", "core,clients", "--rounds", "2", "--users", "5000", "--json", "--out", str(out)]
    assert federated.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text(encoding="utf-8"))
    assert {"machine", "versions", "load", "date"} <= found.keys()
    for measured in (found["core"]["ratio"], found["core"]["cpu_ratio"], found["clients"]["cpu_added"]):
        assert 0 < measured["min"] <= measured["median"] <= measured["max"]
        assert measured["reps"] == 2
    assert found["core"]["users"] == 5000


def test_round_and_plain_loop_add_up_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise, the loop's mean is the mean of the clipped vectors, some of which are clipped."""
    monkeypatch.setattr(core, "SIGMA", 0.0)
    ready = core.Ready(50, core.network(8), arrays=7)
    asked = clients._asked(core.network(8), 50, 20, step=1)
    sent = torch.stack([torch.cat([t.flatten() for t in c.tensors]) for c in ready.contributions(asked)]).double()
    assert torch.equal(sent.float(), torch.stack(ready.asked()))
    sizes = sent.norm(dim=1, keepdim=True)
    assert bool((sizes > 0).all())
    right = (sent / (sizes / core.CLIP).clamp(min=1)).sum(0) / 20
    assert float((core.plain(ready.asked(), 20) - right).norm() / right.norm()) < 1e-5


def test_local_training_is_watched_and_given_back() -> None:
    before = vars(engine)["descended"]
    with clients._watched() as spent:
        asked = clients._asked(stackexchange.make_model(50, 8), 2_000, 3, step=0)
        clients._sum(InProcess(PrivateUsers(clients.MadeUp(50, most=4)), clients.LOCAL), asked)
    assert len(spent) == 3
    assert all(s.wall > 0 for s in spent)
    assert vars(engine)["descended"] is before


@pytest.mark.paper
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
def test_population_reads_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "users.sqlite"
    stackoverflow_file.write(path, 300)
    row = population._in_fresh_process(path, rounds=2, cohort=5)  # the peak of this one is that of earlier tests
    assert row["users"] == 300
    assert row["round_seconds"]["reps"] == 2
    assert 0 < row["peak_above_idle_mb"] < row["peak_mb"]


def test_flower_says_why_it_was_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "--flower-python" in flower.measure(None, nodes=2, rounds=1, parameters=10)["not_run"]
    missing = flower.measure(str(tmp_path / "python"), nodes=2, rounds=1, parameters=10)
    assert "No such file" in missing["not_run"]


def test_tables_show_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    middle = {"median": 1.5, "min": 1.0, "max": 2.0, "reps": 3}
    parts = {"core": {"ratio": middle}, "population": [{"users": 10, "round_seconds": middle}], "load": [0.1]}
    federated._print({**parts, "clients": {"workers": {"speedup": middle}}, "flower": {"not_run": "no ray"}})
    shown = capsys.readouterr().out
    assert shown.count("1.5 (1 to 2, n=3)") == 3
    assert "workers.speedup" in shown
    assert "no ray" in shown


@pytest.mark.parametrize("arguments", [["--parts", "speed"], ["--rounds", "0"]])
def test_what_is_asked_wrongly_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        federated.main(arguments)
