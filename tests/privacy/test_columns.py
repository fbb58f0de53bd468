"""A private column of another kind than the public one is refused at set-up; what one record does is not heard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import sparse
from torch import Tensor

import halfsilver as hs
from halfsilver.errors import ConfigError, PrivateDataError
from halfsilver.linear_model import MirrorLinearRegression, MirrorLogisticRegression
from halfsilver.privacy.data import PrivateData

pd: Any = pytest.importorskip("pandas")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 3))
Y = X @ [1.0, -2.0, 0.5]
PUBLIC, PRIVATE = slice(0, 100), slice(100, 300)


def frame(part: slice, **columns: Any) -> Any:
    return pd.DataFrame(X[part].copy(), columns=list("abc")).assign(**columns)


def both(x: Any, y: Any, public_x: Any, public_y: Any, ledger: Path, kind: type = MirrorLinearRegression) -> Any:
    model = kind(n_private=200, steps=2, epsilon=5.0, ledger=ledger, unsafe_seed=1)
    return model.fit(x, y, X_public=public_x, y_public=public_y)


DATES = pd.date_range("2020-01-01", periods=300)
WORDS = np.array(["yes", "no"])[(Y > 0).astype(int)]


@pytest.mark.parametrize(
    ("private", "public", "column"),
    [
        (frame(PRIVATE, a="male"), frame(PUBLIC), "column 'a', to hold the kind 'number'"),
        (frame(PRIVATE, b=DATES[PRIVATE]), frame(PUBLIC), "column 'b', .* not 'date'"),
        (frame(PRIVATE, c=pd.Categorical(["u"] * 200)), frame(PUBLIC), "column 'c', .* not 'category'"),
        (frame(PRIVATE, a=pd.array(["1"] * 200, dtype="string")), frame(PUBLIC), "column 'a', .* not 'text'"),
        ((X[PRIVATE] * 50).astype(np.uint8), X[PUBLIC], "'float', .* not 'integer'"),
        (X[PRIVATE] > 0, X[PUBLIC], "'float', .* not 'bool'"),
        (X[PRIVATE], (X[PUBLIC] * 9).astype(int), "'integer', .* not 'float'"),
        (X[PRIVATE].astype(str), X[PUBLIC], "'float', .* not 'text'"),
        (sparse.csr_matrix((X[PRIVATE] * 50).astype(np.int32)), X[PUBLIC], "'float', .* not 'integer'"),
    ],
    ids=["text", "date", "category", "string", "uint8", "bool", "float", "str", "sparse"],
)
@pytest.mark.parametrize("kind", [MirrorLinearRegression, MirrorLogisticRegression])
def test_features_of_another_kind_are_refused_before_epsilon_is_spent(
    private: Any, public: Any, column: str, kind: Any, tmp_path: Path
) -> None:
    labels = Y if kind is MirrorLinearRegression else Y > 0
    with pytest.raises(ConfigError, match=f"Expected private X.*{column}"):
        both(private, labels[PRIVATE], public, labels[PUBLIC], tmp_path / "ledger", kind)
    assert not (tmp_path / "ledger").exists()


@pytest.mark.parametrize(
    ("private", "public"),
    [
        (Y > 0, WORDS),
        (WORDS, (Y > 0).astype(int)),
        (WORDS, pd.Series(Y > 0)),
        (pd.Series(WORDS).astype("category"), (Y > 0).astype(int)),
        (DATES, WORDS),
    ],
    ids=["bool", "text", "series", "category", "date"],
)
def test_labels_of_another_kind_are_refused_before_epsilon_is_spent(private: Any, public: Any, tmp_path: Path) -> None:
    """By the public labels, and by the declared classes where these have none."""
    with pytest.raises(ConfigError, match="Expected private y to hold the kind"):
        both(X[PRIVATE], private[PRIVATE], X[PUBLIC], public[PUBLIC], tmp_path / "ledger", MirrorLogisticRegression)
    model = MirrorLogisticRegression(classes=list(np.unique(public)), ledger=tmp_path / "ledger")
    with pytest.raises(ConfigError, match="Expected private y to hold the kind"):
        model.fit(X[PRIVATE], private[PRIVATE], X_public=X[PUBLIC])
    with pytest.raises(ConfigError, match="Expected private y to hold the kind"):
        both(X[PRIVATE], (Y > 0)[PRIVATE], X[PUBLIC], Y[PUBLIC], tmp_path / "ledger")
    assert not (tmp_path / "ledger").exists()


@pytest.mark.parametrize(
    ("private", "public"),
    [
        (X[PRIVATE].astype(np.float32), X[PUBLIC]),
        ((X[PRIVATE] * 9).astype(np.uint8), (X[PUBLIC] * 9).astype(np.int64)),
        (frame(PRIVATE, a=1, b=True), frame(PUBLIC)),
        (frame(PRIVATE, a=pd.array([1] * 200, dtype="Int64")), X[PUBLIC]),
        (frame(PRIVATE, a="text").astype({"a": object}), frame(PUBLIC)),
        (X[PRIVATE].astype(str).astype(object), X[PUBLIC]),
        ([["male", 1, True]] * 200, X[PUBLIC]),
        (X[PRIVATE], X[PUBLIC].tolist()),
        (X[PRIVATE], frame(PUBLIC).astype(object)),
    ],
    ids=["width", "widths", "numbers", "nullable", "object", "objects", "list", "public list", "public object"],
)
@pytest.mark.filterwarnings("ignore:X (has|does not have) (valid )?feature names:UserWarning")
def test_widths_kinds_of_numbers_in_frames_and_objects_are_silent(private: Any, public: Any, tmp_path: Path) -> None:
    assert both(private, Y[PRIVATE], public, Y[PUBLIC], tmp_path / "ledger").coef_.shape == (3,)


@pytest.mark.parametrize("labels", [[0.0, 1.0], [False, True], [0, 1]], ids=str)
def test_labels_that_are_numbers_are_compared_by_value(labels: list[Any], tmp_path: Path) -> None:
    values = np.array(labels)[(Y > 0).astype(int)]
    model = both(
        X[PRIVATE], values[PRIVATE], X[PUBLIC], (Y > 0).astype(int)[PUBLIC], tmp_path / "l", MirrorLogisticRegression
    )
    assert (model.predict(X) == (Y > 0)).mean() > 0.9


@pytest.mark.parametrize("public", [np.float32, np.float64])
def test_the_dtype_of_what_is_released_is_that_of_the_public_rows(public: Any, tmp_path: Path) -> None:
    """One record with a text, a list, a file of another width: no weight is stored otherwise for it."""
    ordinary = frame(PRIVATE).astype(np.float32)
    odd = pd.concat([ordinary.astype(object), pd.DataFrame([{"a": 0.1, "b": "a text", "c": 0.3}])], ignore_index=True)
    odd = odd.astype({"a": np.float32, "c": np.float32})
    found = set()
    for number, table in enumerate((ordinary, odd, ordinary.to_numpy(), ordinary.values.tolist(), X[PRIVATE])):
        model = MirrorLinearRegression(n_private=200, steps=2, run_dir=tmp_path / str(number))
        names = frame(PUBLIC).astype(public)
        shown = names if isinstance(table, pd.DataFrame) else names.to_numpy()
        model.fit(table, np.resize(Y[PRIVATE], len(table)), X_public=shown, y_public=Y[PUBLIC])
        for name in ("model", "checkpoint"):
            weights = load_file(tmp_path / str(number) / "run" / f"{name}.safetensors")
            found |= {t.dtype for key, t in weights.items() if key.endswith("weight")}
    assert found == {torch.float32 if public is np.float32 else torch.float64}


def test_a_number_beyond_float32_is_left_out_without_a_warning(tmp_path: Path) -> None:
    huge = X[PRIVATE].copy()
    huge[0] = 1e300
    model = both(huge, Y[PRIVATE], X[PUBLIC].astype(np.float32), Y[PUBLIC], tmp_path / "ledger")
    assert np.isfinite(model.coef_).all()


@pytest.mark.parametrize("kind", [MirrorLinearRegression, MirrorLogisticRegression])
def test_no_message_tells_how_many_private_rows_there_are(kind: Any, tmp_path: Path) -> None:
    labels = (Y > 0).astype(int)
    given: list[tuple[Any, Any, Any]] = [
        (X[:217], labels[:193], None),
        (sparse.csr_matrix(X[:217]), labels[:193], None),
        (X[:217], np.zeros((217, 2, 2)), None),
        (X[:217], labels[:217], np.ones(193)),
        (X[:217], labels[:217], np.ones((217, 2))),
        (X[:217, 0], labels[:217], None),
        (X[:217, :0], labels[:217], None),
        (sparse.csr_matrix(X[:217, :0]), labels[:217], None),
        (X[:217, :2], labels[:217], None),
    ]
    for x, y, weight in given:
        model = kind(ledger=tmp_path / "ledger")
        more = {"sample_weight_public": np.ones(100)} if weight is not None and kind is MirrorLinearRegression else {}
        with pytest.raises(ValueError) as found:  # noqa: PT011 (each has another message)
            model.fit(x, y, X_public=X[PUBLIC].copy(), y_public=labels[PUBLIC].copy(), sample_weight=weight, **more)
        assert not any(number in str(found.value) for number in ("217", "193"))
    with pytest.raises(PrivateDataError) as keys:
        PrivateData(torch.zeros(217, 2), users=np.zeros((217, 2)))
    assert "217" not in str(keys.value)


@pytest.mark.parametrize("kind", [MirrorLinearRegression, MirrorLogisticRegression])
def test_no_private_row_at_all_is_not_heard_either(kind: Any, tmp_path: Path) -> None:
    """Its neighbour has one row, which is taken."""
    labels = (Y > 0).astype(float)
    for make in (np.asarray, sparse.csr_matrix):
        model = kind(n_private=200, steps=2).fit(make(X[:0]), labels[:0], X_public=X[PUBLIC], y_public=labels[PUBLIC])
        assert model.predict(X).shape == (300,)


# ---- the trainer


def loss_fn(model: Any, batch: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0].float().flatten(1)), batch[1].long(), reduction="none")


def fit(private: Any, public: Any, tmp_path: Path, *, loss: Any = loss_fn, **options: Any) -> Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    plan = hs.PrivacyPlan(steps=2, sampling_rate=1.0, expected_batch_size=200, noise_multiplier=1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hs.Trainer(model, loss, optimizer=sgd, plan=plan, unsafe_seed=1, **options)
    trainer.fit(private, public, run_dir=tmp_path)
    return model.weight.detach().clone()


FEATURES, LABELS = torch.tensor(X, dtype=torch.float32), torch.tensor(Y > 0).long()


@pytest.mark.parametrize(
    ("private", "message"),
    [
        ((FEATURES.to(torch.uint8), LABELS), r"column\[0\] to hold floating-point .* not whole"),
        ((FEATURES > 0, LABELS), r"column\[0\] to hold floating-point .* not bool"),
        ((FEATURES, LABELS.float()), r"column\[1\] to hold whole .* not floating-point"),
        ((FEATURES, LABELS[:, None]), r"column\[1\] .* of shape \(\).* of shape \(1,\)"),
        ((FEATURES.numpy().astype(np.int16), LABELS.numpy()), r"column\[0\] to hold floating-point .* not whole"),
    ],
    ids=["uint8", "bool", "float labels", "shape", "arrays"],
)
def test_tensors_of_another_kind_or_shape_are_refused(private: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(tuple(part[PRIVATE] for part in private), (FEATURES[PUBLIC], LABELS[PUBLIC]), tmp_path)
    assert not hs.Ledger.open(tmp_path / "ledger.jsonl").runs


def test_images_of_another_size_are_refused_unless_the_public_loss_is_another(tmp_path: Path) -> None:
    """Though the model takes both: a mean over pixels."""
    images, small, labels = torch.zeros(40, 3, 6, 6), torch.zeros(30, 3, 4, 4), torch.arange(40) % 2

    def pooled(model: Any, batch: Any) -> Tensor:
        return loss_fn(model, (batch[0].mean((2, 3)), batch[1]))

    with pytest.raises(ConfigError, match=r"shape \(3, 4, 4\).* \(3, 6, 6\).*public_loss_fn"):
        fit((images, labels), (small, labels[:30]), tmp_path / "a", loss=pooled)
    other = fit(
        (images, labels), (small, labels[:30]), tmp_path / "b", loss=pooled, public_loss_fn=lambda *a: pooled(*a)
    )
    assert other.isfinite().all()


def test_widths_of_tensors_are_not_compared(tmp_path: Path) -> None:
    public = FEATURES[PUBLIC].double(), LABELS[PUBLIC].int()
    assert fit((FEATURES[PRIVATE], LABELS[PRIVATE]), public, tmp_path).isfinite().all()


@pytest.mark.parametrize("odd", [np.nan, "a text", None])
def test_an_odd_record_of_a_frame_changes_nothing(odd: Any, tmp_path: Path) -> None:
    """Not even the dtype that the columns have with it: labels are whole numbers in the public frame."""
    x, y = frame(PRIVATE), pd.Series(Y[PRIVATE] > 0).astype(int)
    public = frame(PUBLIC), pd.Series(Y[PUBLIC] > 0).astype(int)
    wanted = fit((x, y), public, tmp_path / "without")
    more_x = pd.concat([x, x[:1]], ignore_index=True)
    more_y = pd.concat([y, pd.Series([odd], dtype=float if odd is np.nan else object)], ignore_index=True)
    assert more_y.dtype in (float, object)
    torch.testing.assert_close(fit((more_x, more_y), public, tmp_path / "label"), wanted, rtol=0, atol=0)
    assert torch.equal(fit((more_x, more_y), tuple(part.to_numpy() for part in public), tmp_path / "arrays"), wanted)
    made_up = (torch.zeros(3), torch.tensor(0))
    handle = PrivateData((more_x, more_y), example=made_up)
    assert torch.equal(fit(handle, public, tmp_path / "example"), wanted)
    assert handle.inspect_not_private(made_up)["unusable"] == {"no whole number": 1}
    y = pd.concat([y, y[:1]], ignore_index=True)
    more_x = more_x.astype(object if odd is not np.nan else float)
    more_x.loc[200, "b"] = odd
    torch.testing.assert_close(fit((more_x, y), public, tmp_path / "feature"), wanted, rtol=0, atol=0)


def test_large_whole_numbers_of_a_frame_stay_exact_beside_a_missing_one() -> None:
    ids = pd.Series([16_777_217.0, 2.0**40 + 1, np.nan])
    records, _ = PrivateData(ids)._open()
    schema = PrivateData(ids)._schema(torch.tensor(3))
    assert records.fetch(slice(0, 3), schema).tolist() == [16_777_217, 2**40 + 1]


def test_a_column_of_a_frame_that_is_declared_as_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="columns of numbers"):
        PrivateData(frame(PRIVATE, a="u"))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["a"] * 20, "Value\\('string'\\)"),
        ([[1.0, 2.0]] * 20, "numbers of 0 dimensions"),
        (list(DATES[:20].to_pydatetime()), "timestamp"),
    ],
    ids=["text", "lists", "dates"],
)
def test_tables_of_another_kind_are_refused(column: Any, message: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    public = datasets.Dataset.from_dict({"x": [[0.0] * 3] * 20, "y": [0, 1] * 10})
    private = datasets.Dataset.from_dict({"x": [[0.0] * 3] * 20, "y": column})
    for given in (private, private.with_format("torch")):
        with pytest.raises(PrivateDataError, match=f"private column 'y'.*{message}"):
            PrivateData(given)._schema(public[0])
        with pytest.raises(PrivateDataError, match=message):
            PrivateData(given, example=public[0], workers=1)._schema()


@pytest.mark.parametrize("column", [[0.0, None] * 10, [True] * 20, "class"], ids=["floats", "bools", "classes"])
def test_tables_of_numbers_are_of_one_kind(column: Any) -> None:
    datasets = pytest.importorskip("datasets")
    public = datasets.Dataset.from_dict({"x": [[0.0] * 3] * 20, "y": [0, 1] * 10})
    private = datasets.Dataset.from_dict({"x": [[0.0] * 3] * 20, "y": [0] * 20 if column == "class" else column})
    if column == "class":
        private = private.cast_column("y", datasets.ClassLabel(names=["u", "v"]))
    assert PrivateData(private)._schema(public[0]).columns == ["x", "y"]
