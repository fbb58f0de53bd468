"""The example with a causal language model: its rows, the gradients of its adapters, and a run on made-up posts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from halfsilver.huggingface import causal_loss
from halfsilver.privacy.gradients import Performance, make_backend

ROOT = Path(__file__).parents[2]
SENTENCES = ("The beer tastes of malt and hops.", "A printer extrudes warm plastic.", "One qubit is measured.")
pytest.importorskip("tokenizers")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        found = import_module("causal_lm")
        before = {name: getattr(found, name) for name in ("SIZE", "PIECES", "BATCH", "EPOCHS")}
        found.SIZE = {**found.SIZE, "n_embd": 16, "n_layer": 1, "n_head": 2}  # type: ignore[attr-defined]
        found.PIECES, found.BATCH, found.EPOCHS = 300, 100, 1  # type: ignore[attr-defined]
        yield found
        for name, value in before.items():
            setattr(found, name, value)
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def folders(example: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Posts of 400 accounts, a small corpus, and the public start on them."""
    data, out = (tmp_path_factory.mktemp(name) for name in ("data", "out"))
    for name in ("stackexchange", "brown", "wikipedia-extra"):
        (data / name).mkdir()
    for name in ("brown/brown.tokens", "wikipedia-extra/wiki.tokens"):
        (data / name).write_text("\n".join(SENTENCES * 60), encoding="utf-8")
    lines = [
        json.dumps({"user": f"u{i}", "title": None, "text": f"{SENTENCES[i % 3]} {' and so on' * j} {i}"})
        for i in range(400)
        for j in range(1 + i % 3)
    ]
    (data / "stackexchange" / "users.jsonl").write_text("\n".join(lines), encoding="utf-8")
    example.start(data, out)
    return data, out


def test_nobody_is_in_two_parts(example: Any, folders: tuple[Path, Path]) -> None:
    parts = example.accounts(folders[0])
    assert sum(map(len, parts.values())) == 400
    assert all(abs(len(texts) / 4 - example.PARTS[part]) < 9 for part, texts in parts.items())  # 4 standard deviations


def rows(example: Any, folders: tuple[Path, Path]) -> Any:
    tokenizer = example.transformers.PreTrainedTokenizerFast.from_pretrained(str(folders[1] / "start"))
    return {part: example.rows_of(texts, tokenizer) for part, texts in example.accounts(folders[0]).items()}


def test_padding_neither_counts_nor_changes_the_loss(example: Any, folders: tuple[Path, Path]) -> None:
    """The loss of a row is that of the model itself on its tokens alone."""
    table, model = rows(example, folders)["test"].with_format("torch"), example.adapted(folders[1], frozen=False).eval()
    batch = table[:20]
    assert bool(((batch["labels"] == -100) == (batch["attention_mask"] == 0)).all())
    lengths = batch["attention_mask"].sum(1).tolist()
    assert min(lengths) < max(lengths)
    with torch.no_grad():
        found = causal_loss(model, batch)
        alone = [
            float(model(input_ids=row[None, :n], labels=row[None, :n]).loss)
            for row, n in zip(batch["input_ids"], lengths, strict=True)
        ]
    torch.testing.assert_close(found, torch.tensor(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_clipped_sum_is_that_of_gradients_one_by_one(
    example: Any, folders: tuple[Path, Path], frozen: bool
) -> None:
    """Of the adapters, on rows with padding; the base and, if frozen, the factors A get no gradient."""
    model = example.adapted(folders[1], frozen=frozen)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:  # at zero, an adapter has no gradient at its first factor
                p.normal_(std=0.1)
    learns = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_B" in name or ("lora_A" in name and not frozen) for name in learns)
    batch = rows(example, folders)["private"].with_format("torch")[:16]
    backend = make_backend(Performance(), model, causal_loss, {name: c[:2] for name, c in batch.items()})
    assert backend.name == "book"
    each = []
    for i in range(16):
        loss = causal_loss(model, {name: column[i : i + 1] for name, column in batch.items()}).sum()
        each.append(torch.cat([g.flatten().double() for g in torch.autograd.grad(loss, list(learns.values()))]))
    middle = sorted(float(g.norm()) for g in each)[8]
    for clip, tolerance in ((1e6, 1e-5), (middle, 2e-3)):  # clipped rows keep a margin for rounding below the norm
        wanted = torch.stack([g * min(1.0, clip / float(g.norm())) for g in each]).sum(0)
        found = torch.cat([t.flatten().double() for t in backend.clipped_sum(batch, clip).tensors])
        assert float((found - wanted).norm()) < tolerance * float(wanted.norm())


@pytest.mark.paper
def test_each_arm_trains_and_is_not_trained_twice(
    example: Any, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = folders
    arms = ("public", "lora", "frozen", "nonprivate")
    for arm in arms:
        monkeypatch.setattr("sys.argv", ["causal_lm.py", "train", f"--data={data}", f"--out={out}", f"--arm={arm}"])
        example.main()
        example.main()
    found = {
        arm: json.loads((out / f"{arm}-eps2.json").read_text()) for arm in ("public", "lora", "frozen", "nonprivate")
    }
    assert all(math.isfinite(one["loss"]) for one in found.values())
    assert found["nonprivate"]["loss"] < found["public"]["loss"]
    assert found["lora"]["spent"] <= 2
    assert found["frozen"]["parameters"] < found["lora"]["parameters"]
