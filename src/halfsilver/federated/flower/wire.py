"""Tensors as Flower's records and back. Nothing that comes in is unpickled, or believed about its own size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from io import BytesIO

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy
from torch import Tensor, nn

from halfsilver._core.tensors import Tensors, trainable

MODEL, CENTRE, TASK, UPDATE, PROOF = "model", "centre", "task", "update", "proof"  # of a request, and of a reply
_HEADER_BYTES = 4096


def to_record(tensors: Sequence[Tensor]) -> ArrayRecord:
    """Named by their numbers: both sides have the model, and so the order of its parameters."""
    return ArrayRecord({str(i): Array(_wide(t.detach()).cpu().contiguous().numpy()) for i, t in enumerate(tensors)})


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.float()  # NumPy has no bfloat16


def from_record(record: ArrayRecord, like: Sequence[Tensor]) -> Tensors | None:
    """Tensors in the shapes of `like`, float32 or float64 as they came; None for anything else."""
    if list(record) != [str(i) for i in range(len(like))]:
        return None
    tensors = [_tensor(a, p) for a, p in zip(record.values(), like, strict=True)]
    return [t for t in tensors if t is not None] if all(t is not None for t in tensors) else None


def _tensor(array: Array, like: Tensor) -> Tensor | None:
    """The bytes of an ``.npy`` file as they are: only the header is parsed, and must state the shape of `like`."""
    data = BytesIO(array.data)
    try:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(data)]
        shape, fortran, dtype = read(data, max_header_size=_HEADER_BYTES)
    except (ValueError, KeyError):
        return None
    whole = len(array.data) - data.tell() == like.numel() * dtype.itemsize
    if shape != tuple(like.shape) or dtype.str not in ("<f4", "<f8") or not whole:
        return None
    values = np.frombuffer(array.data, dtype, offset=data.tell()).reshape(shape, order="F" if fortran else "C")
    return torch.from_numpy(values.copy())


def size(record: ArrayRecord) -> int:
    return sum(len(a.data) for a in record.values())


def largest_reply(like: Sequence[Tensor]) -> int:
    """Bytes of an update in float64, headers included."""
    return sum(8 * p.numel() + _HEADER_BYTES for p in like)


def fixed_part(model: nn.Module) -> str:
    """SHA-256 of all that does not travel: frozen weights, buffers, and the names and shapes of the rest."""
    live, seen = {id(p) for p in trainable(model)}, hashlib.sha256()
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        seen.update(f"{name} {tuple(t.shape)} {t.dtype}\n".encode())
        if id(t) not in live:
            seen.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()
