"""Readers for the standard files of the benchmarks: CIFAR-10 binary, EMNIST idx, WikiText tokens.

Each reader takes the folder that holds the data sets, checks every size before it returns anything, and raises
`DataMissing` for a file that is not there or not whole.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from halfsilver.errors import DataMissing

CIFAR10_ROWS = 10_000  # images in each of the six files
_CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label, then the planes of red, green and blue
_IDX_BYTES, _EMNIST_SIDE, _EMNIST_CLASSES, _EMNIST_ROWS = 0x08, 28, 47, 814_255


@dataclass(frozen=True)
class Source:
    """Where a data set is published, for the message about a missing file."""

    name: str
    page: str


CIFAR10 = Source("CIFAR-10 (binary version), University of Toronto", "https://www.cs.toronto.edu/~kriz/cifar.html")
EMNIST = Source("EMNIST (MNIST format), NIST", "https://www.nist.gov/itl/products-and-services/emnist-dataset")
WIKITEXT = Source("WikiText, Salesforce", "https://huggingface.co/datasets/Salesforce/wikitext")
WIKIPEDIA = Source("Wikipedia, as lines of tokens", "https://dumps.wikimedia.org")
BROWN = Source("Brown corpus, as lines of tokens", "https://www.nltk.org/nltk_data")


def find(folder: Path, name: str, source: Source) -> Path:
    """`folder`/`name`, or `DataMissing` with where the file was looked for and where to get it."""
    path = Path(folder) / name
    if not path.is_file():
        raise DataMissing(
            f"There is no file {name} in {folder}. Give the folder that holds it with --data, or set HALFSILVER_DATA. "
            f"It belongs to {source.name}: {source.page}"
        )
    return path


def cifar10(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32] of bytes, channels last in memory, and labels [N]; `part` is "train" or "test"."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if part == "train" else ["test_batch.bin"]
    maps = [_cifar10_map(find(folder, f"cifar-10-batches-bin/{name}", CIFAR10)) for name in names]
    images = torch.empty(CIFAR10_ROWS * len(maps), 32, 32, 3, dtype=torch.uint8)
    for rows, records in zip(images.view(len(maps), CIFAR10_ROWS, 32, 32, 3), maps, strict=True):
        rows.numpy()[...] = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = np.concatenate([records[:, 0] for records in maps])
    return images.permute(0, 3, 1, 2), torch.from_numpy(labels.astype(np.int64))


def cifar10_images(path: Path) -> np.ndarray:
    """Images [N, 3, 32, 32] of a file in the format of CIFAR-10's batches, with any number of records."""
    rows = max(1, path.stat().st_size // _CIFAR10_RECORD)
    return _cifar10_map(path, rows)[:, 1:].reshape(-1, 3, 32, 32)


def _cifar10_map(path: Path, rows: int = CIFAR10_ROWS) -> np.ndarray:
    expected, found = rows * _CIFAR10_RECORD, path.stat().st_size
    if found != expected:
        _broken(path, f"{found:,} bytes", f"{expected:,} bytes")
    records = np.memmap(path, np.uint8, "r", shape=(rows, _CIFAR10_RECORD))
    if records[:, 0].max() > 9:
        _broken(path, "a label above 9", "labels from 0 to 9")
    return records


def emnist(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 28, 28] of bytes, upright, and labels [N] of the ByMerge split; `part` is "train" or "test"."""
    prefix = f"EMNIST/raw/emnist-bymerge-{part}"
    path, labels_path = (
        find(folder, f"{prefix}-{kind}-ubyte.gz", EMNIST) for kind in ("images-idx3", "labels-idx1")
    )  # both are looked for before either is unpacked
    labels = _idx(labels_path, ())
    if labels.max() >= _EMNIST_CLASSES:
        _broken(labels_path, f"a label above {_EMNIST_CLASSES - 1}", f"labels from 0 to {_EMNIST_CLASSES - 1}")
    images = _idx(path, (_EMNIST_SIDE, _EMNIST_SIDE))
    if len(images) != len(labels):
        _broken(path, f"{len(images):,} images", f"{len(labels):,}, as many as there are labels")
    # NIST stores the columns of an image where MNIST stores its rows.
    return torch.from_numpy(images).transpose(1, 2).contiguous()[:, None], torch.from_numpy(labels).long()


def _idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """An idx file of bytes whose rows have `shape`: magic, sizes as big-endian int32, then the rows."""
    try:
        with gzip.open(path, "rb") as stream:
            header = stream.read(8 + 4 * len(shape))
            rows = _idx_rows(path, header, shape)
            data = np.empty((rows, *shape), np.uint8)
            _fill(path, stream, data.reshape(-1))
            return data
    except (OSError, EOFError, zlib.error) as error:
        raise DataMissing(f"The file {path} cannot be unpacked ({error}). {_AGAIN}") from error


def _idx_rows(path: Path, header: bytes, shape: tuple[int, ...]) -> int:
    magic = bytes([0, 0, _IDX_BYTES, 1 + len(shape)])
    if len(header) != 8 + 4 * len(shape) or header[:4] != magic:
        _broken(path, f"a header {header[:4].hex()}", f"{magic.hex()} and {1 + len(shape)} sizes")
    rows, *sizes = (int.from_bytes(header[i : i + 4], "big") for i in range(4, len(header), 4))
    if tuple(sizes) != shape or not 1 <= rows <= _EMNIST_ROWS:
        _broken(path, f"sizes {(rows, *sizes)}", f"sizes {('n', *shape)} with n from 1 to {_EMNIST_ROWS:,}")
    return rows


def _fill(path: Path, stream: gzip.GzipFile, data: np.ndarray) -> None:
    """Read exactly `data`, piece by piece, so that a damaged file cannot ask for more memory than its rows take."""
    view, got = data.data, 0
    while got < len(view) and (count := stream.readinto(view[got:])):
        got += count
    if got != len(view) or stream.read(1):
        found = f"{got:,}" if got != len(view) else f"more than {got:,}"
        _broken(path, f"{found} bytes of rows", f"{len(view):,} by its header")


def tokens(folder: Path, name: str, source: Source) -> list[list[str]]:
    """The words of each line that is not empty."""
    return [words for words in lines_of_words(find(folder, name, source)) if words]


def lines_of_words(path: Path) -> list[list[str]]:
    """The words of each line, none for an empty one."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # not shown: it quotes the text
        raise DataMissing(f"The file {path} is damaged: it is not UTF-8 text. {_AGAIN}") from None
    lines = [line.split() for line in text.split("\n")]
    if not any(lines):
        _broken(path, f"{path.stat().st_size:,} bytes and no word", "lines of words")
    return lines


_AGAIN = "Remove it and get it again."


def _broken(path: Path, found: str, expected: str) -> NoReturn:
    raise DataMissing(f"The file {path} is damaged: it has {found}, expected {expected}. {_AGAIN}")
