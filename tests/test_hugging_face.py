"""Hugging Face's `datasets` as private, public and test data, and a model of `transformers`, both as they come."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import halfsilver as hs
from halfsilver._core.tensors import flatten
from halfsilver.errors import ConfigError, PrivateDataError
from halfsilver.mirror.geometry import ShapedLayer
from halfsilver.mirror.rows import PublicRows
from halfsilver.privacy.data import _DatasetRecords
from halfsilver.privacy.gradients import make_backend
from halfsilver.privacy.schema import Schema
from tests.privacy.test_book import one_by_one
from tests.test_trainer import weights

datasets = pytest.importorskip("datasets")

WORDS, LENGTH = 50, 6
COLUMNS = ("attention_mask", "input_ids", "labels")
PLAN = hs.PrivacyPlan(steps=2, sampling_rate=0.1, expected_batch_size=8, noise_multiplier=1.0)
SPEED = hs.Performance(backend="vmap", micro_batch_size=8)  # nothing to measure first


def texts(rows: int, seed: int) -> dict[str, list[Any]]:
    """What a tokenizer gives with padding="max_length", and a class."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (rows, LENGTH), generator=g)
    mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (rows, 1), generator=g)).long()
    return {"input_ids": (ids * mask).tolist(), "attention_mask": mask.tolist(), "labels": (ids[:, 0] % 3).tolist()}


def table(rows: int = 80, seed: int = 0, **more: list[Any]) -> Any:
    return datasets.Dataset.from_dict({**texts(rows, seed), **more})


def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return functional.cross_entropy(logits, batch["labels"], reduction="none")


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "hidden_size": 8, "intermediate_size": 16}
    torch.manual_seed(0)
    config = transformers.BertConfig(**size, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


class Words(nn.Module):
    """A small stand-in for BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(WORDS, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        mean = (self.words(input_ids) * attention_mask[..., None]).mean(1)
        return type("Output", (), {"logits": self.last(mean)})


def fit(folder: Path, private: Any, public: Any, model: nn.Module | None = None, **options: Any) -> hs.Trainer:
    model = model or Words()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"optimizer": sgd, "plan": PLAN, "mirror": hs.FirstOrder(0.5), "performance": SPEED, **options}
    made = hs.Trainer(model, loss_fn, **options)
    made.fit(private, public, run_dir=folder, test=public)
    return made


def test_rows_of_a_table_are_rows_of_tensors() -> None:
    """Also floats, which torch by itself collates in double precision, and lists of lists."""
    more = {"weight": [0.1, 0.2], "image": [[[1.5, 2], [3, 4]], [[5, 6], [7, 8]]], "seen": [True, False]}
    made = datasets.Dataset.from_dict(more)
    expected = {name: torch.tensor(column) for name, column in more.items()}
    everything = slice(0, 2)
    public = PublicRows(made).batch(everything, torch.device("cpu"))
    records, _ = (handle := hs.PrivateData(made, example=made[0]))._open()
    private = records.fetch(everything, handle._schema())
    for batch in (public, private):
        assert {name: t.dtype for name, t in batch.items()} == {name: t.dtype for name, t in expected.items()}
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_every_format_of_a_table_trains_the_same(form: str | None, tmp_path: Path) -> None:
    ends = []
    tensors = [{name: torch.tensor(column) for name, column in texts(*size).items()} for size in ((80, 0), (20, 1))]
    tables = [table(*size).with_format(form) for size in ((80, 0), (20, 1))]
    for number, (private, public) in enumerate((tensors, tables)):
        torch.manual_seed(0)
        ends.append(weights(fit(tmp_path / str(number), private, public, unsafe_seed=1).model))
    assert torch.equal(*ends)


def test_a_private_table_is_read_by_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public, keys = table(), table(20, 1), list[Any]()
    original = datasets.Dataset.__getitem__

    def noting(self: Any, key: Any) -> Any:
        keys.extend(([key] if isinstance(key, int) else key) if len(self) == len(private) else [])
        return original(self, key)

    def whole(self: Any, *args: Any) -> None:
        raise AssertionError("the whole table is read")

    monkeypatch.setattr(datasets.Dataset, "__getitem__", noting)
    for name in ("__iter__", "to_dict", "to_pandas"):
        monkeypatch.setattr(datasets.Dataset, name, whole)
    fit(tmp_path, private, public)
    assert keys
    assert {type(key) for key in keys} == {int}
    assert len(keys) < 60  # two samples at rate 0.1 of 80 rows: above this once in 10**15


def test_bert_as_it_comes(tmp_path: Path) -> None:
    """Dropout and all, and dicts of tokens to the end."""
    model = bert()
    before = weights(model).clone()
    made = fit(tmp_path, table(), table(20, 1), model, performance=hs.Performance(micro_batch_size=8))
    assert not torch.equal(before, weights(model))
    assert math.isfinite(made.evaluate(table(20, 2))["loss"])


def test_each_row_of_bert_is_clipped() -> None:
    """Its embedding of positions is looked up once for all rows: the sum is held against one row at a time."""
    model, rows = bert().eval(), 6
    batch = {name: torch.tensor(column) for name, column in texts(rows, 0).items()}
    each = [flatten(g).double() for g in one_by_one(model, loss_fn, batch, rows)]
    clip = float(torch.stack([g.norm() for g in each]).median())
    expected = sum(g * min(1.0, clip / float(g.norm())) for g in each)
    found = flatten(make_backend(hs.Performance(), model, loss_fn, batch).clipped_sum(batch, clip).tensors).double()
    assert float((found - expected).norm()) <= 1e-3 * clip * rows  # each is clipped a little below the norm


@pytest.mark.parametrize("adapters", [False, True])
def test_bert_in_a_geometry(adapters: bool, tmp_path: Path) -> None:
    """As it comes, or with PEFT's adapters: then of the encoder only these are whitened, and the new head."""
    model = bert().eval()
    if adapters:
        peft = pytest.importorskip("peft")
        options = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, **options)).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:  # at zero, an adapter has no gradient at its first factor
                    p.normal_(std=0.1)
    batch = {name: torch.tensor(column) for name, column in texts(20, 1).items()}
    before, kinds = loss_fn(model, batch), {name: type(m) for name, m in model.named_modules()}
    shaped = hs.Whitened().shape(model, loss_fn, table(20, 1))
    torch.testing.assert_close(loss_fn(model, batch), before, rtol=1e-4, atol=1e-5)
    ends = {n.removesuffix(".default").split(".")[-1] for n, m in model.named_modules() if isinstance(m, ShapedLayer)}
    embeddings = {"word_embeddings", "position_embeddings", "token_type_embeddings"}
    everything = {*embeddings, "query", "key", "value", "dense", "classifier"}
    assert ends == ({"lora_A", "lora_B", "modules_to_save"} if adapters else everything)
    shaped.merge()
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    start = weights(model).clone()
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    performance = hs.Performance(micro_batch_size=8)
    made = fit(tmp_path, table(), table(20, 1), model, optimizer=sgd, performance=performance, geometry=hs.Whitened())
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert not torch.equal(start, weights(model))
    assert math.isfinite(made.evaluate(table(20, 2))["loss"])


def test_a_text_in_the_public_rows_is_named(tmp_path: Path) -> None:
    private, public = (table(n, s, text=["words"] * n) for n, s in ((80, 0), (20, 1)))
    with pytest.raises(ConfigError, match=r"record\['text'\], got str.*select_columns"):
        fit(tmp_path / "a", private, public)
    fit(tmp_path / "b", private.select_columns(COLUMNS), public.select_columns(COLUMNS))


def test_other_columns_than_the_public_ones_are_refused(tmp_path: Path) -> None:
    """Instead of training on nothing, as no row would have the structure of the public ones."""
    private = table(patient=list(range(80)))
    with pytest.raises(PrivateDataError, match=r"columns \['attention_mask', 'input_ids', 'labels', 'patient'\], but"):
        fit(tmp_path / "a", private, table(20, 1))
    shown = private.with_format("torch", columns=list(COLUMNS))  # hides the column
    fit(tmp_path / "b", shown, table(20, 1))


def test_rows_that_do_not_fit_are_left_out_without_a_word() -> None:
    columns = texts(4, 0)
    columns["input_ids"][1], columns["labels"][2] = [1, 2], None
    records, _ = (handle := hs.PrivateData(datasets.Dataset.from_dict(columns), example=table(1, 1)[0]))._open()
    kept = records.fetch(slice(0, 4), handle._schema())
    assert kept["input_ids"].tolist() == [columns["input_ids"][0], columns["input_ids"][3]]


@pytest.mark.parametrize("form", [None, "torch", "numpy", "custom"])
def test_a_row_does_not_change_how_others_are_read(form: str | None) -> None:
    """Tables of numbers are read in one go, and others row by row, because what a transform does to a batch is unknown:
    here it cuts all rows to the shortest.
    """

    def cut(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        shortest = min(map(len, batch["input_ids"]))
        return {**batch, "input_ids": [row[:shortest] for row in batch["input_ids"]]}

    columns = texts(6, 0)
    columns["input_ids"][1], columns["labels"][2] = [1, 2], None
    made = datasets.Dataset.from_dict(columns)
    made = made.with_transform(cut) if form == "custom" else made.with_format(form)
    records, _ = (handle := hs.PrivateData(made, example=table(1, 1)[0]))._open()
    kept = records.fetch(torch.tensor([5, 1, 0, 2, 4]), handle._schema())
    assert kept["input_ids"].tolist() == [columns["input_ids"][i] for i in (5, 0, 4)]
    assert kept["labels"].tolist() == [columns["labels"][i] for i in (5, 0, 4)]


def test_a_table_of_numbers_is_read_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = list[Any]()
    original = datasets.Dataset.__getitem__

    def noting(self: Any, key: Any) -> Any:
        keys.append(key)
        return original(self, key)

    monkeypatch.setattr(datasets.Dataset, "__getitem__", noting)
    records, _ = (handle := hs.PrivateData(table().with_format("torch"), example=table(1, 1)[0]))._open()
    keys.clear()
    records.fetch(torch.tensor([7, 3, 7]), handle._schema())
    assert keys == [[7, 3, 7]]


NUMBERS = st.one_of(
    st.none(),
    st.lists(st.one_of(st.none(), st.floats(allow_nan=False, width=32)), min_size=0, max_size=3),
)


@given(rows=st.lists(st.tuples(NUMBERS, st.one_of(st.none(), st.integers(-5, 5))), min_size=1, max_size=6))
def test_rows_at_once_are_rows_one_by_one(rows: list[tuple[list[float | None] | None, int | None]]) -> None:
    """Whatever is missing or has another length: the same rows, to the bit."""
    kinds = datasets.Features({"x": datasets.List(datasets.Value("float64")), "y": datasets.Value("int64")})
    columns = dict(zip(("x", "y"), map(list, zip(*rows, strict=True)), strict=True))
    records = _DatasetRecords(datasets.Dataset.from_dict(columns, features=kinds))
    schema = Schema.of_record({"x": torch.zeros(2), "y": torch.tensor(0)})
    one_by_one = [records._read(i, schema) for i in range(len(rows))]
    expected = schema.stack([row for row in one_by_one if row is not None])
    found = records.fetch(slice(0, len(rows)), schema)
    for name in ("x", "y"):
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name])


def test_public_rows_of_several_lengths_are_refused(tmp_path: Path) -> None:
    public = texts(20, 1)
    public["input_ids"][7] = [1, 2]
    with pytest.raises(ConfigError, match=r"fails on public rows.*equal size.*\[6\].*\[2\]"):
        fit(tmp_path, table(), datasets.Dataset.from_dict(public))


def test_floats_of_public_tuples_are_single_as_private_ones_are() -> None:
    rows = [(torch.zeros(2), 0.5, {"ids": [1, 2]})] * 3
    x, y, named = PublicRows(rows).batch(slice(0, 3), torch.device("cpu"))
    assert (x.shape, y.dtype) == ((3, 2), torch.float32)
    assert named["ids"].shape == (3, 2)
