"""The example with a real sentence encoder: its rows, its losses, and a short run of each way on made-up posts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import halfsilver as hs

ROOT = Path(__file__).parents[2]
TOPICS = ("beer tastes of malt and hops", "a printer extrudes warm plastic", "a qubit is measured in a basis")


@pytest.fixture(scope="module")
def posts() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        yield import_module("posts")
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 accounts of one to three posts on three sites."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "stackexchange").mkdir()
    lines = [
        json.dumps({"user": f"u{i}", "site": f"site{i % 3}", "title": None, "text": f"{TOPICS[i % 3]} {j} {i}"})
        for i in range(400)
        for j in range(1 + i % 3)
    ]
    (folder / "stackexchange" / "users.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_nobody_is_in_two_parts_and_the_longest_posts_are_kept(posts: Any, data: Path) -> None:
    parts, sites = posts.accounts(data / "stackexchange" / "users.jsonl", 2)
    assert sites == ["site0", "site1", "site2"]
    assert sum(map(len, parts.values())) == 400
    assert {len(one.texts) for part in parts.values() for one in part} == {1, 2}
    shares = {part: len(people) / 4 for part, people in parts.items()}
    assert all(abs(shares[part] - posts.PARTS[part]) < 8 for part in posts.PARTS)  # 4 standard deviations
    assert all(len(text) >= len(other) for one in parts["private"] for text, other in [(one.texts[0], one.texts[-1])])


def test_an_account_weighs_the_same_however_much_it_wrote(posts: Any) -> None:
    torch.manual_seed(0)
    head, features = torch.nn.Linear(posts.WIDTH, 3), torch.randn(2, 8, posts.WIDTH)
    labels = torch.full((2, 8), posts.NO_POST)
    labels[0, 0], labels[1, :4] = 2, torch.tensor([0, 1, 2, 0])
    found = posts.head_loss(head, {"features": features, "labels": labels})
    alone = [functional.cross_entropy(head(features[i, : i * 3 + 1]), labels[i, : i * 3 + 1]) for i in range(2)]
    torch.testing.assert_close(found, torch.stack(alone))


@pytest.mark.nightly
def test_four_methods_and_a_figure(posts: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = posts.WAYS["head"]
    short = replace(full.recipe, epochs=2, pretrain=hs.study.Pretrain(epochs=1))
    monkeypatch.setattr(posts, "WAYS", {"head": replace(full, recipe=short, seeds=1)})
    monkeypatch.setattr(posts, "EPSILONS", (8.0,))
    monkeypatch.setattr(sys, "argv", ["posts.py", "head", "--data", str(data), "--out", str(tmp_path)])
    posts.main()
    made = json.loads((tmp_path / "posts.json").read_text(encoding="utf-8"))
    assert {run["method"] for run in made["results"][0]["runs"]} == set(posts.METHODS)
    assert made["results"][0]["verdict"]["sentences"]
    assert "<svg" in (tmp_path / "posts.svg").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_the_encoder_with_adapters_trains_as_it_comes(posts: Any, data: Path, tmp_path: Path) -> None:
    parts, sites = posts.accounts(data / "stackexchange" / "users.jsonl", 1)
    private, public = (posts.lora_rows(parts[part][:8]) for part in ("private", "public"))
    model = posts.lora_model(len(sites))
    learns = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in learns]
    plan = hs.PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=8, noise_multiplier=1.0)
    sgd = torch.optim.SGD(learns, lr=0.1)
    trainer = hs.Trainer(model, posts.lora_loss, optimizer=sgd, plan=plan, mirror=hs.FirstOrder(0.5))
    assert trainer.fit(private, public, run_dir=tmp_path).updates == 1
    assert all(not torch.equal(p, old) for p, old in zip(learns, before, strict=True))


def test_the_page_has_the_committed_figures() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "posts-head.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "real-models.md").read_text(encoding="utf-8")
    for result in found["results"]:
        means = result["verdict"]["means"]
        lines = {name: _line(page, f"{name}, ε = {result['epsilon']:g}") for name in ("loss", "accuracy")}
        for method in ("public", "cold", "warm", "pda", "whitened"):
            assert f" {means[method]['loss']['mean']:.3f} ± " in lines["loss"]
            assert f" {100 * means[method]['accuracy']['mean']:.1f} % " in lines["accuracy"]


def _line(page: str, start: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(f"| {start}"))
