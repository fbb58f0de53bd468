"""Losses per example of `transformers` models, against the models' own loss of one row at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfsilver as hs
from halfsilver._core.tensors import flatten
from halfsilver.errors import ConfigError
from halfsilver.huggingface import causal_loss, sequence_loss, token_loss
from halfsilver.privacy.gradients import make_backend
from tests.privacy.test_book import one_by_one
from tests.test_trainer import weights

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, ROWS = 40, 7, 5
SIZE = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "hidden_size": 8, "intermediate_size": 16}


def bert(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZE, num_hidden_layers=1, num_attention_heads=2, **options)
    return getattr(transformers, kind)(config).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (rows, 1), generator=g)).long()
    return {"input_ids": torch.randint(1, WORDS, (rows, LENGTH), generator=g) * mask, "attention_mask": mask}


def masked(labels: Tensor, mask: Tensor) -> Tensor:
    return labels.masked_fill(mask == 0, -100)


def cases() -> dict[str, tuple[Any, Any, Tensor]]:
    made, g = batch(), torch.Generator().manual_seed(2)
    tokens = masked(torch.randint(0, 3, (ROWS, LENGTH), generator=g), made["attention_mask"])
    words = masked(made["input_ids"], made["attention_mask"])
    return {
        "classes": (
            sequence_loss, bert("BertForSequenceClassification", num_labels=3), torch.tensor([0, 1, 2, 1, 0])
        ),
        "target": (sequence_loss, bert("BertForSequenceClassification", num_labels=1), torch.randn(ROWS, generator=g)),
        "targets in a column": (
            sequence_loss, bert("BertForSequenceClassification", num_labels=1), torch.randn(ROWS, 1, generator=g)
        ),
        "several targets": (
            sequence_loss,
            bert("BertForSequenceClassification", num_labels=3, problem_type="regression"),
            torch.randn(ROWS, 3, generator=g),
        ),
        "several labels": (
            sequence_loss,
            bert("BertForSequenceClassification", num_labels=3, problem_type="multi_label_classification"),
            torch.rand(ROWS, 3, generator=g).round(),
        ),
        "tokens": (token_loss, bert("BertForTokenClassification", num_labels=3), tokens),
        "masked words": (token_loss, bert("BertForMaskedLM"), words),
        "next words": (causal_loss, gpt2(), words),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(cases()))
def test_against_the_models_own_loss(name: str) -> None:
    loss_fn, model, labels = cases()[name]
    made = {**batch(), "labels": labels}
    with torch.no_grad():
        each = [float(model(**{k: t[i : i + 1] for k, t in made.items()}).loss) for i in range(ROWS)]
    torch.testing.assert_close(loss_fn(model, made).detach(), torch.tensor(each), rtol=1e-5, atol=1e-6)


def test_a_row_without_a_word_that_counts() -> None:
    made = {**batch(), "labels": torch.full((ROWS, LENGTH), -100)}
    assert causal_loss(gpt2(), made).tolist() == [0.0] * ROWS


def test_labels_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="to have one called 'labels'"):
        sequence_loss(gpt2(), batch())
    with pytest.raises(ConfigError, match=r"\(5, 7, 40\), got \(5,\).*token_loss or causal_loss"):
        sequence_loss(gpt2(), {**batch(), "labels": torch.zeros(ROWS, dtype=torch.long)})
    with pytest.raises(ConfigError, match="one label per token"):
        token_loss(bert("BertForMaskedLM"), {**batch(), "labels": torch.zeros(ROWS, 3, dtype=torch.long)})


def adapted(model: Any) -> Any:
    """With LoRA, whose second factor is not zero, because the first has no gradient then."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    made = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return made


def sentences(rows: int) -> dict[str, Tensor]:
    made = batch(rows)
    return {**made, "labels": masked(made["input_ids"], made["attention_mask"])}


@pytest.mark.parametrize("adapters", [False, True])
def test_each_row_of_a_causal_model_is_clipped(adapters: bool) -> None:
    """The sum is held against the gradients of one row at a time, of tied embeddings or of LoRA's factors."""
    model, rows = adapted(gpt2()).eval() if adapters else gpt2(), 6
    each = [flatten(g).double() for g in one_by_one(model, causal_loss, sentences(rows), rows)]
    clip = float(torch.stack([g.norm() for g in each]).median())
    expected = sum(g * min(1.0, clip / float(g.norm())) for g in each)
    backend = make_backend(hs.Performance(), model, causal_loss, sentences(rows))
    found = flatten(backend.clipped_sum(sentences(rows), clip).tensors).double()
    assert float((found - expected).norm()) <= 1e-3 * clip * rows  # each is clipped a little below the norm


@pytest.mark.parametrize("adapters", [False, True])
def test_a_causal_model_trains(adapters: bool, tmp_path: Path) -> None:
    """Tied embeddings and all; or LoRA alone."""
    model = (adapted(gpt2()) if adapters else gpt2()).train()
    rows = sentences(60)
    before = weights(model).clone()
    learns = [p for p in model.parameters() if p.requires_grad]
    plan = hs.PrivacyPlan(steps=2, sampling_rate=0.2, expected_batch_size=12, noise_multiplier=1.0)
    trainer = hs.Trainer(model, causal_loss, optimizer=torch.optim.AdamW(learns, lr=0.01), plan=plan)
    assert trainer.fit(rows, run_dir=tmp_path).stopped == "finished"
    assert not torch.equal(before, weights(model))
