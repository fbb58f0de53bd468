"""The examples of docs/extend.md, put through the contract suite of their kind as that page says."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from halfsilver.mirror import Clock
from halfsilver.tasks import TASKS, named
from halfsilver.tasks.recipes import parse
from tests.federated import test_contract as engines
from tests.federated.flower_grid import asked, total
from tests.federated.helpers import LOCAL, columns, linear, loss_fn
from tests.markdown import ROOT, blocks
from tests.mirror import conftest
from tests.mirror import test_contract as maps
from tests.privacy import test_book


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page defines, without the blocks that use it: `test_readme` runs those."""
    namespace: dict[str, Any] = {"torch": torch}
    for block in blocks(ROOT / "docs" / "extend.md", "python"):
        if "assert" not in block.text:
            exec(compile(block.source, "extend.md", "exec", dont_inherit=True), namespace)
    return namespace


least_squares, released, clock = conftest.least_squares, conftest.released, conftest.clock


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_map(page: dict[str, Any], dtype: torch.dtype, least_squares: Any, released: Any, clock: Clock) -> None:
    agree = page["Agree"]()
    maps.test_direction_is_pure_and_fits_the_parameters(agree, dtype, least_squares, released, clock)
    maps.test_persistent_state_is_all_that_a_checkpoint_needs(agree, least_squares, released, clock)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (test_book.STEPS,), (2, 3)])
def test_the_kernel(page: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Held against plain autograd, and really used: nothing falls back."""
    layer = page["LayerScale"](test_book.WIDTH).to(dtype)
    backend = test_book.check(layer, torch.randn(test_book.ROWS, *shape, test_book.WIDTH, dtype=dtype))
    assert list(backend._kernels.values()) == [page["layer_scale"]]


def test_the_task(page: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name and a recipe are all that the commands need."""
    monkeypatch.setitem(TASKS, "digits", page["problem"])
    given = page["RECIPE"].replace("[recipe]", "[recipe]\nnoise_multiplier = 2.0")  # to search for it takes longer
    monkeypatch.setattr(named, "load", lambda task, name: parse(given, name))
    options: dict[str, Any] = {
        "method": "pda",
        "epsilon": None,
        "delta": None,
        "rate": None,
        "alpha_end": None,
        "seed": 0,
    }
    done = named.run_of_task(
        "digits", data=tmp_path, quick=True, out=tmp_path / "run", tell=lambda text: None, **options
    )
    assert (done["steps"], done["delta"]) == (2, 1e-4)
    assert done["final"]["accuracy"] > 0.2


def phones_of(page: dict[str, Any]) -> list[Any]:
    """The users of the engines' contract."""
    x, y = columns(120)
    return [page["Phone"]((x[i : i + 6], y[i : i + 6]), linear(1), loss_fn, LOCAL) for i in range(0, 120, 6)]


@pytest.mark.parametrize("drawn", [[0, 3, 4, 19], [*range(20)], []], ids=["some", "all", "nobody"])
def test_the_engine(page: dict[str, Any], drawn: list[int], tmp_path: Path) -> None:
    phones = phones_of(page)
    engines.test_a_round_is_the_sum_of_clipped_updates(
        lambda folder: nullcontext(page["Post"](phones)), drawn, tmp_path
    )


def test_a_phone_that_fails_is_missing(page: dict[str, Any]) -> None:
    phones = phones_of(page)
    without = total(page["Post"](phones), asked([1, 2]))
    phones[0].rows = None
    assert torch.equal(total(page["Post"](phones), asked([0, 1, 2])), without)
