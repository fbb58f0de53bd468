"""What all tests share: one thread, no deadlines, and the folder with the real data sets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The tensors of the tests are small: more threads only get in each other's way, and the order of a sum
# (so its last bit) would depend on the machine.
torch.set_num_threads(1)

# A shared machine pauses at any moment, so time limits are pytest's. On CI the same cases every time.
settings.register_profile("halfsilver", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("halfsilver")


TIERS = ("core", "docs", "paper", "nightly")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test is in one tier: the one that it is marked with, or else `core`. Examples in docstrings are `docs`."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker("docs")
        tiers = [tier for tier in TIERS if item.get_closest_marker(tier)]
        if len(tiers) > 1:
            raise pytest.UsageError(f"{item.nodeid} is in the tiers {tiers}; expected one.")
        if not tiers:
            item.add_marker("core")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets; a test that asks for it is skipped where there is none."""
    name = os.environ.get("HALFSILVER_DATA", "")
    if not name:
        pytest.skip("HALFSILVER_DATA is not set: it names the folder with the real data sets")
    if not Path(name).is_dir():
        pytest.skip(f"HALFSILVER_DATA={name} is not a folder")
    return Path(name)
