"""The privacy boundary is a folder boundary: who may import what, and who may touch a private record."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import halfsilver as hs
from halfsilver.privacy.gradients import BackendName
from halfsilver.trainer import StepReport
from tools.architecture import PACKAGE, dotted, imports, modules

SHARED = ("halfsilver.errors", "halfsilver._core")  # what both sides may import
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
NETWORK = {"aiohttp", "ftplib", "http", "httpx", "requests", "smtplib", "socket", "ssl", "urllib", "urllib3"}
LOADERS = {
    "torch.load",
    "torch.save",
    "torch.serialization",
    "numpy.load",
    "np.load",
    "torch.jit.load",
    "torch.hub",
}

Finder = Callable[[ast.AST, str], Iterator[str]]


# ---- by reading the source


def crossings(tree: ast.AST, module: str) -> Iterator[str]:
    """Imports of halfsilver by a module of privacy/ or mirror/ beyond its own folder and the shared helpers.

    The top of the package counts as the other side: it has everybody's names.
    """
    own = ".".join(module.split(".")[:2])
    for name in imports(tree, module):
        inside = name == own or name.startswith(f"{own}.")
        shared = name.startswith(SHARED)
        if name.split(".")[0] == "halfsilver" and not inside and not shared:
            yield name


def unpicklers(tree: ast.AST, module: str) -> Iterator[str]:
    """Whatever could run code that lies in a file."""
    for name in imports(tree, module):
        if name.split(".")[0] in PICKLES or any(name == x or name.startswith(f"{x}.") for x in LOADERS):
            yield name
    yield from (n for n in (dotted(node) for node in ast.walk(tree)) if n in LOADERS)


def network(tree: ast.AST, module: str) -> Iterator[str]:
    generator = {"ssl.RAND_add", "ssl.RAND_bytes"}  # of random bytes: opens nothing
    yield from (name for name in imports(tree, module) if name.split(".")[0] in NETWORK and name not in generator)


def _findings(find: Finder, folder: str = "") -> list[str]:
    return [f"{module}: {name}" for module, tree in modules(PACKAGE / folder) for name in find(tree, module)]


@pytest.mark.parametrize("folder", ["privacy", "mirror"])
def test_the_two_sides_do_not_import_each_other(folder: str) -> None:
    assert len(list(modules(PACKAGE / folder))) > 3
    assert _findings(crossings, folder) == []


def test_shared_helpers_import_neither_side() -> None:
    trees = dict(modules())
    helpers = [name for name in trees if name.startswith(SHARED)]
    assert len(helpers) > 5
    found = {name for helper in helpers for name in imports(trees[helper], helper)}
    assert {name for name in found if name.startswith("halfsilver") and not name.startswith(SHARED)} == set()


def test_nothing_in_the_package_reads_pickles() -> None:
    assert _findings(unpicklers) == []


def test_nothing_in_the_package_opens_a_connection() -> None:
    assert _findings(network) == []


@pytest.mark.parametrize(
    "line",
    [
        "import halfsilver.privacy",
        "import halfsilver.privacy.data as d",
        "import halfsilver",
        "from halfsilver import privacy",
        "from halfsilver import PrivacyPlan",
        "from halfsilver.privacy import data",
        "from halfsilver.privacy.data import PrivateData",
        "from .. import privacy",
        "from ..privacy import data",
        "from ..privacy.data import PrivateData",
        "def f():\n    from halfsilver.privacy import data",
        "class A:\n    def f(self):\n        from ..privacy import data",
        "if TYPE_CHECKING:\n    from halfsilver.privacy.data import PrivateData",
        "import importlib\nimportlib.import_module('halfsilver.privacy')",
        "from importlib import import_module\nimport_module('..privacy', __package__)",
        "__import__('halfsilver.privacy.data')",
        "import importlib\nimportlib.import_module(name)",
        "import importlib\nimportlib.import_module(f'{name}.maps')",
        "import importlib\nimportlib.import_module(f'halfsilver.privacy.{name}')",
    ],
)
def test_a_crossing_is_seen_however_it_is_written(line: str) -> None:
    assert list(crossings(ast.parse(line), "halfsilver.mirror.base"))


@pytest.mark.parametrize(
    "line",
    [
        "from halfsilver.errors import ConfigError",
        "from halfsilver import errors",
        "from .._core import tensors",
        "from . import sets",
        "from .schedules import Clock",
        "from halfsilver.mirror.public import PublicLoss",
        "import torch",
    ],
)
def test_what_stays_on_its_side_is_allowed(line: str) -> None:
    assert not list(crossings(ast.parse(line), "halfsilver.mirror.base"))


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x', weights_only=False)",
        "from torch import load",
        "import numpy as np\nnp.load('x')",
        "def f():\n    import cloudpickle",
    ],
)
def test_a_pickle_is_seen_however_it_is_written(line: str) -> None:
    assert list(unpicklers(ast.parse(line), "halfsilver.runs.folder"))


# ---- by watching a run


class Spy(Dataset[tuple[Tensor, Tensor]]):
    """A data set that notes which module of halfsilver, the nearest on the call stack, reached for it."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x, y
        self.touched_by: dict[str, set[str]] = {}

    def _note(self, method: str) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and not frame.f_globals.get("__name__", "").startswith("halfsilver"):
            frame = frame.f_back
        self.touched_by.setdefault(method, set()).add(frame.f_globals.get("__name__", "?"))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._note("__getitem__")
        return self._x[index], self._y[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        self._note("__getitems__")
        return [(self._x[i], self._y[i]) for i in indices]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._note("__iter__")
        return iter([(x, y) for x, y in zip(self._x, self._y, strict=True)])

    def __len__(self) -> int:
        self._note("__len__")
        return len(self._x)

    def strangers(self) -> set[str]:
        """Modules outside halfsilver.privacy that touched a record or counted them."""
        seen = set().union(*self.touched_by.values())
        return {name for name in seen if not name.startswith("halfsilver.privacy.")}


def _rows(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 3, generator=generator)
    return x, (x.sum(1) > 0).long()


def _loss(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def _trainer(**options: Any) -> hs.Trainer:
    model = nn.Linear(3, 2)
    plan = hs.PrivacyPlan(steps=4, sampling_rate=0.5, expected_batch_size=32, noise_multiplier=1.0)
    mirror = hs.FirstOrder(hs.cosine(end=0.5))
    return hs.Trainer(
        model,
        _loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        plan=plan,
        mirror=mirror,
        **options,
    )


@pytest.mark.parametrize("backend", ["vmap", "auto"])
def test_only_privacy_touches_private_records(backend: BackendName, tmp_path: Path) -> None:
    """From the first call of `fit` to a resumed and finished run, tests, callbacks and released metrics included."""
    reports: list[StepReport] = []
    private, public = Spy(*_rows(64)), Spy(*_rows(8))
    for _ in range(2):  # the second call finds the finished run
        trainer = _trainer(
            performance=hs.Performance(backend=backend),
            metrics={"loss": _loss},
            callbacks=[reports.append],
            average="uniform",
        )
        trainer.pretrain(public, epochs=2)
        trainer.fit(private, public, run_dir=tmp_path / "run", test=public, test_every=2)
        trainer.evaluate(private, release=hs.Release(noise_multiplier=9.0, bounds={"loss": 1.0}))
    assert {"__getitem__", "__getitems__"} & set(private.touched_by), "the spy saw nothing"
    assert private.strangers() == set()
    assert public.strangers(), "the public set is read elsewhere, so the spy can tell the difference"


def test_the_spy_sees_a_stranger() -> None:
    spy = Spy(*_rows(4))
    for module in ("halfsilver.trainer", "halfsilver.mirror.public", "halfsilver.privacy.data"):
        exec("len(spy); spy[0]; iter(spy); spy.__getitems__([1])", {"__name__": module, "spy": spy})
    assert spy.strangers() == {"halfsilver.trainer", "halfsilver.mirror.public"}
    assert set(spy.touched_by) == {"__len__", "__getitem__", "__iter__", "__getitems__"}
