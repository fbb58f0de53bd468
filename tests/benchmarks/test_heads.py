"""The features of the heads' study, on a few made-up images: all files, resumed and repeated."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.studies import heads
from tests.markdown import ROOT
from tools import front


def rows(data: Path, part: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(part))
    size = 300 if part == "train" else 40
    labels = torch.randint(0, 10, (size,), generator=generator)
    noise = torch.randint(0, 150, (size, 3, 32, 32), generator=generator)
    return (noise + 10 * labels[:, None, None, None]).to(torch.uint8), labels


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, command: str = "network", *more: str) -> Path:
    monkeypatch.setitem(
        heads.TASKS, "cifar10", replace(heads.TASKS["cifar10"], read=rows, patches=4, epsilons=(100.0,))
    )
    options = [command, "--seed", "3", "--width", "2", "--epochs", "2", "--data", "none", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", ["heads", *options, *more])
    heads.main()
    return folder / "cifar10-width2-epochs2-seed3"


@pytest.mark.paper
def test_the_command_writes_what_a_head_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    folder = run(monkeypatch, tmp_path)
    names = ["features.safetensors", "network.safetensors", "result.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert "epoch   2 of 2" in capsys.readouterr().out
    kept, record = load_file(folder / "features.safetensors"), json.loads((folder / "result.json").read_text())
    assert {name: tuple(t.shape) for name, t in kept.items()} == {
        "train": (300, 96),
        "test": (40, 96),  # 4 cells of 4, 8 and 8 channels, and the mean and largest of 8
        "train_logits": (300, 10),
        "test_logits": (40, 10),
    }

    network = heads.make_network(heads.Config(task="cifar10", seed=3, width=2, epochs=2))
    network.load_state_dict(load_file(folder / "network.safetensors"))
    images, labels = rows(Path(), "test")
    x = (images.float() - 127.5) / 63.75
    with torch.no_grad():
        logits = (network.eval()(x) + network(x.flip(-1))) / 2
    torch.testing.assert_close(kept["test_logits"], logits, rtol=1e-4, atol=1e-4)
    assert record["test_accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item(), abs=0.026)
    assert (record["config"]["seed"], record["features"]) == (3, 96)

    monkeypatch.setattr(heads, "pretrain", None)  # nothing is trained again
    (folder / "result.json").unlink()
    run(monkeypatch, tmp_path)
    again = json.loads((folder / "result.json").read_text())
    assert again["test_loss"] == record["test_loss"]

    run(monkeypatch, tmp_path, "head", "--features", "both")
    head = json.loads((folder / "head-both.json").read_text())
    found = {one["method"]: one for one in head["results"]}
    assert list(found) == ["public", "warm", "whitened", "nonprivate"]
    assert found["public"]["loss"] == pytest.approx(record["test_loss"])
    assert found["nonprivate"]["loss"] < found["public"]["loss"], "brightness tells the label, and features see it"
    assert found["whitened"]["epsilon"] == 100.0
    monkeypatch.setattr(heads, "RATES", (1.0,))
    run(monkeypatch, tmp_path, "search")
    searched = json.loads((folder / "search-network.json").read_text())["results"]
    assert [one["damping"] for one in searched[1:]] == [1.0, 3.0, 10.0]
    assert {one["learning_rate"] for one in searched} == {searched[0]["learning_rate"]}
    patches = load_file(tmp_path / "cifar10-patches4-seed3.safetensors")
    assert patches["train"].shape[0] == 300
    assert patches["train"].shape[1] == patches["test"].shape[1] == len(patches["variances"])


def test_networks_of_one_seed_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    first, second = run(monkeypatch, tmp_path), tmp_path / "cifar10-width2-epochs2-seed3-member1"
    run(monkeypatch, tmp_path, "network", "--member", "1")
    members = [heads.Config(task="cifar10", seed=3, width=2, epochs=2, member=member) for member in (0, 1)]
    joined = heads.head_rows(members, tmp_path, "network")["test"]
    logits = [load_file(folder / "features.safetensors")["test_logits"] for folder in (first, second)]
    assert not torch.equal(*logits), "another start"
    torch.testing.assert_close(torch.tensor(joined["logits"]).float(), (logits[0] + logits[1]) / 2)
    assert joined["x"].shape == (40, 192)
    alone = heads.head_rows(members[:1], tmp_path, "network")["test"]["x"]
    assert (joined["x"][:, :96] == alone).all()


def test_public_rows_are_those_of_the_task() -> None:
    """By the same rule and seed as `halfsilver compare cifar10` splits them."""
    config = heads.Config(task="cifar10", seed=1, width=2, epochs=1)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(heads.TASKS, "cifar10", replace(heads.TASKS["cifar10"], read=rows))
        images, labels = heads.public_rows(config, Path())
    assert torch.equal(images, rows(Path(), "train")[0][order[:12]])
    assert torch.equal(labels, rows(Path(), "train")[1][order[:12]])


def test_the_page_has_the_committed_figures() -> None:
    record = json.loads((ROOT / "benchmarks/results/heads/cifar10-width24-epochs60-seed0.json").read_text())
    study = json.loads((ROOT / "benchmarks/results/studies/cifar10-eps3.51.json").read_text())
    page = (ROOT / "docs/features.md").read_text(encoding="utf-8")
    assert f"{record['test_accuracy']:.1%}, loss {record['test_loss']:.3f}".replace("%", " %") in page
    start = study["verdict"]["means"]["public"]["accuracy"]["mean"]
    assert f"starts at {100 * start:.1f} %" in page
    assert f"by {100 * (record['test_accuracy'] - start):.0f} points" in page
    assert record["config"]["seed"] == 0


@pytest.mark.parametrize(
    "pattern",
    [
        "cifar10-width24-epochs60-seed?-head-network.json",
        "emnist-width24-epochs40-seed?-head-network.json",
    ],
)
def test_the_page_of_heads_has_the_committed_means(pattern: str) -> None:
    records = front.read(pattern)
    page = (ROOT / "docs/heads.md").read_text(encoding="utf-8")
    assert [record["config"]["seed"] for record in records] == [*range(len(records))]
    for one in front.rows_of(records):
        assert f"{one['accuracy']:.1f} % / {one['loss']:.3f}" in page


def test_the_picture_of_heads_is_that_of_the_committed_figures(tmp_path: Path) -> None:
    front.draw(front.rows_of(front.read(front.PATTERN)), tmp_path / "front.svg")
    assert (tmp_path / "front.svg").read_bytes() == front.PICTURE.read_bytes(), "make it again: python -m tools.front"


@pytest.mark.parametrize(
    ("name", "folder", "epsilon"),
    [("CIFAR-10", "cifar10-width24-epochs60-seed0", 2.0), ("EMNIST", "emnist-width24-epochs40-seed0", 3.0)],
)
def test_the_page_has_the_best_of_the_search(name: str, folder: str, epsilon: float) -> None:
    """And the usual values are within a point of it."""
    records = {
        kind: json.loads((ROOT / f"benchmarks/results/heads/{folder}-{kind}-network.json").read_text(encoding="utf-8"))
        for kind in ("search", "head")
    }
    best = max(one["accuracy"] for one in records["search"]["results"])
    (usual,) = (
        one["accuracy"]
        for one in records["head"]["results"]
        if (one["method"], one["epsilon"]) == ("whitened", epsilon)
    )
    page = (ROOT / "docs/heads.md").read_text(encoding="utf-8")
    assert f"| {name}, ε = {epsilon:g} | {100 * usual:.1f} % | {100 * best:.1f} % |" in page
    assert usual > best - 0.01
