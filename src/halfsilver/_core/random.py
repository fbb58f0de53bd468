"""Randomness that leaves no trace: a block of code with generators of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from halfsilver.errors import require


@contextmanager
def own_randomness(seed: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Run the body on generators seeded by `seed`, and put every global generator back afterwards.

    What the private pass does to the generators can therefore not reach the public branch, nor the other way round.
    Python's and NumPy's generators are included: data sets and transforms often use them.
    """
    cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=cuda):
            _seed_all(seed, cuda)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _seed_all(seed: int, cuda: Sequence[int]) -> None:
    # torch.manual_seed would also seed devices that fork_rng does not restore.
    torch.default_generator.manual_seed(seed)
    for index in cuda:
        with torch.cuda.device(index):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def require_device(device: torch.device | str) -> None:
    """Refuse a device whose generators `own_randomness` does not know, and one that is not here."""
    kind = str(device).partition(":")[0]
    hint = "This version trains on no other device. Move the model to the CPU, and give no device."
    require(kind in ("cpu", "cuda"), "device", str(device), "to be 'cpu' or 'cuda'", hint)
    found = kind == "cpu" or torch.cuda.is_available()
    require(found, "device", str(device), "to be 'cpu', because torch finds no CUDA device here")
