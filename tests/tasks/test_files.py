"""The readers take the standard files as published, and refuse every other one with an error that says why."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfsilver.errors import DataMissing
from halfsilver.tasks import files

RECORD = 3073


def idx(rows: np.ndarray) -> bytes:
    """An idx file of bytes, not yet packed."""
    sizes = b"".join(n.to_bytes(4, "big") for n in rows.shape)
    return bytes([0, 0, 8, rows.ndim]) + sizes + rows.astype(np.uint8).tobytes()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def emnist_paths(folder: Path, part: str = "train") -> tuple[Path, Path]:
    prefix = folder / "EMNIST" / "raw" / f"emnist-bymerge-{part}"
    return Path(f"{prefix}-images-idx3-ubyte.gz"), Path(f"{prefix}-labels-idx1-ubyte.gz")


def write_emnist(folder: Path, rows: int = 5, part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(len(part))  # other images in the test set than in the training set
    images, labels = rng.integers(0, 256, (rows, 28, 28)), rng.integers(0, 47, rows)
    for path, content in zip(emnist_paths(folder, part), (images, labels), strict=True):
        write(path, gzip.compress(idx(content), mtime=0))
    return images, labels


def write_cifar10(folder: Path) -> np.ndarray:
    """The six files, small numbers that tell file, row and place apart; returns the records of the training set."""
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    made = []
    for name in names:
        records = rng.integers(0, 256, (10_000, RECORD), dtype=np.uint8)
        records[:, 0] %= 10
        write(folder / "cifar-10-batches-bin" / name, records.tobytes())
        made.append(records)
    return np.concatenate(made[:5])


# ---- what is right


def test_emnist_images_are_turned_upright(tmp_path: Path) -> None:
    images, labels = write_emnist(tmp_path)
    read, read_labels = files.emnist(tmp_path, "train")
    assert (read.shape, read.dtype, read_labels.dtype) == ((5, 1, 28, 28), torch.uint8, torch.int64)
    assert (read[:, 0].numpy() == images.transpose(0, 2, 1)).all()
    assert (read_labels.numpy() == labels).all()


def test_cifar10_has_its_rows_in_order_and_its_colours_apart(tmp_path: Path) -> None:
    records = write_cifar10(tmp_path)
    images, labels = files.cifar10(tmp_path, "train")
    assert images.shape == (50_000, 3, 32, 32)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert (labels.numpy() == records[:, 0]).all()
    chosen = [0, 9_999, 10_000, 49_999]
    assert (images[chosen].numpy() == records[chosen, 1:].reshape(-1, 3, 32, 32)).all()
    assert files.cifar10(tmp_path, "test")[0].shape == (10_000, 3, 32, 32)


def test_lines_of_words_without_the_empty_ones(tmp_path: Path) -> None:
    write(tmp_path / "some.tokens", " = Title = \n \n\n a b <unk> é \n".encode())
    assert files.tokens(tmp_path, "some.tokens", files.WIKITEXT) == [["=", "Title", "="], ["a", "b", "<unk>", "é"]]


# ---- what is missing


@pytest.mark.parametrize(
    ("read", "name", "page"),
    [
        (lambda d: files.cifar10(d, "train"), "cifar-10-batches-bin/data_batch_1.bin", "toronto.edu"),
        (lambda d: files.emnist(d, "test"), "emnist-bymerge-test-images-idx3-ubyte.gz", "nist.gov"),
        (lambda d: files.tokens(d, "wikitext-2/wiki.train.tokens", files.WIKITEXT), "wiki.train.tokens", "wikitext"),
    ],
)
def test_a_missing_file_is_named_with_its_folder_and_its_source(
    read: Callable[[Path], object], name: str, page: str, tmp_path: Path
) -> None:
    with pytest.raises(DataMissing) as caught:
        read(tmp_path)
    for part in (name, str(tmp_path), "--data", "HALFSILVER_DATA", page):
        assert part in str(caught.value)


def test_labels_are_looked_for_before_images_are_unpacked(tmp_path: Path) -> None:
    write(emnist_paths(tmp_path)[0], b"not a gzip file")
    with pytest.raises(DataMissing, match=r"no file .*labels-idx1"):
        files.emnist(tmp_path, "train")


# ---- what is broken


@pytest.mark.parametrize("change", [-1, 1, -RECORD])
def test_a_cifar10_file_of_another_size(change: int, tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(10_000 * RECORD + change)
    with pytest.raises(DataMissing, match=rf"test_batch.bin .*{10_000 * RECORD + change:,} bytes, expected 30,730,000"):
        files.cifar10(tmp_path, "test")


def test_a_cifar10_label_that_is_none(tmp_path: Path) -> None:
    records = np.zeros((10_000, RECORD), np.uint8)
    records[77, 0] = 10
    write(tmp_path / "cifar-10-batches-bin" / "test_batch.bin", records.tobytes())
    with pytest.raises(DataMissing, match="labels from 0 to 9"):
        files.cifar10(tmp_path, "test")


GOOD = idx(np.zeros((5, 28, 28)))
PACKED = gzip.compress(GOOD, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"\x00\x00\x0d\x03" + GOOD[4:], mtime=0), "header 00000d03, expected 00000803"),
        (gzip.compress(GOOD[:10], mtime=0), "expected 00000803 and 3 sizes"),
        (gzip.compress(idx(np.zeros((5, 32, 32))), mtime=0), r"sizes \(5, 32, 32\), expected"),
        (gzip.compress(b"\x00\x00\x08\x03\xff\xff\xff\xff" + GOOD[8:], mtime=0), "n from 1 to 814,255"),
        (gzip.compress(idx(np.zeros((0, 28, 28))), mtime=0), "n from 1 to 814,255"),
        (gzip.compress(GOOD[:-1], mtime=0), "3,919 bytes of rows, expected 3,920"),
        (gzip.compress(GOOD + b"\x00", mtime=0), "more than 3,920 bytes of rows"),
        (gzip.compress(idx(np.zeros((4, 28, 28))), mtime=0), "4 images, expected 5"),
        (PACKED[:-12], "cannot be unpacked"),
        (PACKED + b"rubbish", "cannot be unpacked"),
        (GOOD, "cannot be unpacked"),
        (b"", "header"),
    ],
)
def test_a_damaged_idx_file(content: bytes, message: str, tmp_path: Path) -> None:
    write_emnist(tmp_path)
    path = write(emnist_paths(tmp_path)[0], content)
    with pytest.raises(DataMissing, match=message) as caught:
        files.emnist(tmp_path, "train")
    assert str(path) in str(caught.value)


def test_an_emnist_label_that_is_none(tmp_path: Path) -> None:
    write_emnist(tmp_path)
    write(emnist_paths(tmp_path)[1], gzip.compress(idx(np.full(5, 47))))
    with pytest.raises(DataMissing, match="labels from 0 to 46"):
        files.emnist(tmp_path, "train")


@settings(max_examples=300)
@given(data=st.data())
def test_damage_anywhere_is_a_typed_error_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes changed, cut or put in, before or after packing: the reader returns five images or raises `DataMissing`."""
    folder = tmp_path_factory.getbasetemp() / "damaged"
    write_emnist(folder)
    inside = data.draw(st.booleans())
    content = bytearray(GOOD if inside else PACKED)
    for _ in range(data.draw(st.integers(1, 3))):
        at, length = data.draw(st.integers(0, len(content))), data.draw(st.integers(0, 40))
        content[at : at + length] = data.draw(st.binary(max_size=40))
    write(emnist_paths(folder)[0], gzip.compress(content, 1, mtime=0) if inside else bytes(content))
    with contextlib.suppress(DataMissing):
        images, labels = files.emnist(folder, "train")
        assert images.shape == (5, 1, 28, 28)
        assert labels.shape == (5,)


@settings(max_examples=200)
@given(content=st.binary(max_size=60))
def test_any_bytes_are_words_or_a_typed_error(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    write(folder / "any.tokens", content)
    with contextlib.suppress(DataMissing):
        lines = files.tokens(folder, "any.tokens", files.BROWN)
        assert lines
        assert all(line and all(line) for line in lines)
