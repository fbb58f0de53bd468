"""Nothing that a private record sets off is seen or remembered: no error, no warning, no value in a message."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import halfsilver as hs
from halfsilver.errors import ConfigError, PrivateDataError
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.silence import silent
from halfsilver.privacy.users.stores.base import TensorUsers

X = torch.linspace(-1, 1, 8)


class Unstackable(torch.Tensor):
    """A tensor of which torch can read the values, and no more."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.stack, torch.cat):
            raise RuntimeError("a private value")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Rude(BaseException):
    """An error that is no `Exception`, as some libraries have them."""


def raised(error: BaseException) -> Callable[[], Any]:
    def read() -> Any:
        raise error

    return read


def warned(kind: type[Warning]) -> Callable[[], Any]:
    def read() -> Any:
        warnings.warn("a private value", kind, stacklevel=1)
        return X, torch.tensor(0)

    return read


def read_only() -> np.ndarray[Any, Any]:
    return np.frombuffer(X.numpy().tobytes(), np.float32)


def quantized() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch will drop them
        return torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)


UNUSABLE: dict[str, Callable[[], Any]] = {
    "sparse": lambda: (X.to_sparse(), torch.tensor(0)),
    "sparse label": lambda: (X, torch.tensor([0]).to_sparse()),
    "meta": lambda: (X.to("meta"), torch.tensor(0)),
    "complex": lambda: (X.to(torch.complex64), torch.tensor(0)),
    "complex number": lambda: (X, 1j),
    "quantized": lambda: (quantized(), torch.tensor(0)),
    "nested": lambda: (torch.nested.nested_tensor([X], layout=torch.jagged), torch.tensor(0)),
    "ragged": lambda: (np.array([1, [2, 3]], dtype=object), torch.tensor(0)),
    "SystemExit": raised(SystemExit("record 3 is broken")),
    "GeneratorExit": raised(GeneratorExit()),
    "rude": raised(Rude("record 3 is broken")),
    "MemoryError": raised(MemoryError()),
    "StopIteration": raised(StopIteration()),
    "RecursionError": raised(RecursionError()),
}
USABLE: dict[str, Callable[[], Any]] = {
    "read-only": lambda: (read_only(), torch.tensor(0)),
    "wants a gradient": lambda: (X.clone().requires_grad_(), torch.tensor(0)),
    "of its own class": lambda: (X.as_subclass(Unstackable), torch.tensor(0)),
    "user warning": warned(UserWarning),
    "deprecation": warned(DeprecationWarning),
    "future": warned(FutureWarning),
}
ODD = UNUSABLE | USABLE


class Records:
    """Four good records, and an odd one in third place."""

    def __init__(self, odd: Callable[[], Any] | None) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> Any:
        if i == 3:
            return self.odd() if self.odd else (torch.zeros(3), torch.tensor(0))
        return X * (i + 1), torch.tensor(i % 2)


EXAMPLE = (torch.zeros(8), torch.tensor(0))


@pytest.mark.parametrize("name", ODD)
def test_an_odd_record_is_left_out_or_read_without_a_word(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    handle = PrivateData(Records(ODD[name]), example=EXAMPLE)
    records, _ = handle._open()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        x, y = records.fetch(slice(0, 5), handle._schema())
        assert warnings.filters == filters
    assert [str(w.message) for w in seen] == []
    assert y.tolist() == ([0, 1, 0, 0] if name in UNUSABLE else [0, 1, 0, 0, 0])
    assert len(x) == len(y)
    assert (type(x), x.dtype, x.layout, x.requires_grad) == (torch.Tensor, torch.float32, torch.strided, False)
    torch.testing.assert_close(x[-1], X * 5)
    assert capfd.readouterr() == ("", "")


def fit(odd: Callable[[], Any] | None, unit: Any, folder: Path) -> torch.Tensor:
    """The weights of a run whose noise is the same every time."""
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    plan = hs.PrivacyPlan(steps=2, sampling_rate=1.0, expected_batch_size=5, noise_multiplier=1.0, unit=unit)
    trainer = hs.Trainer(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        plan=plan,
        unsafe_seed=1,
        progress=False,
    )
    keys = [0, 1, 2, 3, 4] if unit == "user" else None
    trainer.fit(PrivateData(Records(odd), example=EXAMPLE, users=keys), run_dir=folder, delta=1e-3)
    return model.weight.detach()


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return {unit: fit(None, unit, tmp_path_factory.mktemp(unit)) for unit in ("example", "user")}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("unit", ["example", "user"])
def test_a_run_with_an_odd_record_ends_as_any_other(
    name: str, unit: str, without: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Warnings are errors here, so none is given either."""
    found = fit(ODD[name], unit, tmp_path)
    assert torch.isfinite(found).all()
    assert (name in UNUSABLE) == torch.equal(found, without[unit])


def test_who_stops_a_run_is_heard() -> None:
    handle = PrivateData(Records(raised(KeyboardInterrupt())), example=EXAMPLE)
    records, _ = handle._open()
    with pytest.raises(KeyboardInterrupt):
        records.fetch(slice(0, 5), handle._schema())
    with pytest.raises(MemoryError), silent(but=(MemoryError,)):
        raise MemoryError
    assert not torch.is_warn_always_enabled()


def test_nothing_of_an_error_is_kept() -> None:
    with pytest.raises(ValueError, match="public") as found:  # noqa: PT012
        with silent():
            raise ValueError("private")
        raise ValueError("public")
    assert found.value.__context__ is None


# What a process prints of public warnings may not depend on what private records have set off before: Python remembers
# in each module which warnings it has shown, and torch in flags of its own.
TRACES = """
import sys, warnings, numpy as np, torch
from halfsilver.privacy.data import PrivateData

def odd():
    warnings.warn("the same words")
    return torch.as_tensor(np.frombuffer(bytes(4), np.float32))

class Records:
    def __len__(self): return 2
    def __getitem__(self, i): return odd() if i and private else torch.zeros(1)

private = sys.argv[1] == "odd"
for when in ("default", "once", "module"):
    warnings.filterwarnings(when, message="the same")
    odd()
    handle = PrivateData(Records(), example=torch.zeros(1))
    records, _ = handle._open()
    for _ in range(2):
        records.fetch(slice(0, 2), handle._schema())
    odd()
    odd()
print({k: v for k, v in globals().get("__warningregistry__", {}).items() if k != "version"})
"""


@pytest.mark.nightly
def test_no_memory_of_a_private_warning_is_left() -> None:
    for code in (TRACES, TRACES.replace("    odd()\n    handle", "    handle")):
        said = []
        for kind in ("odd", "even"):
            command = [sys.executable, "-W", "default", "-c", code, kind]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            said.append(done.stdout + done.stderr)
        assert said[0] == said[1]
        assert "the same words" in said[0]
        assert "not writable" in said[0]


def test_warnings_about_made_up_rows_are_heard(tmp_path: Path) -> None:
    """The set-up reads no private record, so what it has to say may be said."""
    model = nn.Linear(8, 2)

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        warnings.warn("of the model", UserWarning, stacklevel=1)
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    plan = hs.PrivacyPlan(steps=1, sampling_rate=0.5, expected_batch_size=2, noise_multiplier=1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hs.Trainer(model, loss_fn, optimizer=sgd, plan=plan, progress=False)
    with pytest.warns(UserWarning, match="of the model"):
        trainer.fit(PrivateData(Records(None), example=EXAMPLE), run_dir=tmp_path, delta=1e-3)


COLUMNS = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "meta": lambda: torch.zeros(4, 2, device="meta"),
    "complex": lambda: torch.zeros(4, 2, dtype=torch.complex64),
    "quantized": lambda: quantized().view(4, 2),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_whole_column_of_another_kind_is_refused_at_the_start(name: str) -> None:
    """Like its shape and dtype, its kind belongs to the table: no row decides it."""
    word = name.split()[0]
    with pytest.raises(PrivateDataError, match=word):
        PrivateData((COLUMNS[name](), torch.zeros(4)))
    with pytest.raises(PrivateDataError, match=word):
        PrivateData(torch.utils.data.TensorDataset(COLUMNS[name](), torch.zeros(4)))
    with pytest.raises(PrivateDataError, match=word):
        TensorUsers((COLUMNS[name](), torch.zeros(4)), users=[0, 0, 1, 1])
    with pytest.raises(ConfigError, match=word):
        PrivateData(Records(None), example=(COLUMNS[name](), 0))._schema()


def test_the_custodian_is_told_what_is_odd() -> None:
    for name, words in {"sparse": "sparse", "complex": "complex", "SystemExit": "record 3 is broken"}.items():
        report = PrivateData(Records(UNUSABLE[name])).inspect_not_private(EXAMPLE)
        (reason,) = report["unusable"]
        assert words in reason
