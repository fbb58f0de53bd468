"""The two sets as files: lines of text, or batches in the binary format of CIFAR-10."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from halfsilver.errors import ConfigError, DataMissing, require
from halfsilver.overlap.images import CORRELATION, overlap_of_images
from halfsilver.overlap.match import Overlap
from halfsilver.overlap.text import MIN_WORDS, SIMILARITY, overlap_of_lines
from halfsilver.runs import RunFolder
from halfsilver.tasks import files


def overlap_of_files(
    private: Path, public: Path, *, similarity: float | None = None, min_words: int = MIN_WORDS
) -> Overlap:
    """Compare two files or folders: images where the names end in ``.bin``, else text with a record a line.

    `similarity` is the least that makes a pair near: by default 0.5 of all word triples, or a correlation of 0.95.
    Records are numbered from 0, empty lines too; the files of a folder follow each other by name.
    """
    sides = [_files(path) for path in (private, public)]
    kinds = {path.suffix == ".bin" for side in sides for path in side}
    require(len(kinds) == 1, "files", [str(private), str(public)], "to be all images (.bin) or all text")
    if kinds == {True}:
        pixels = (np.concatenate([files.cifar10_images(path) for path in side]) for side in sides)
        return overlap_of_images(*pixels, correlation=CORRELATION if similarity is None else similarity)
    lines = ([line for path in side for line in files.lines_of_words(path)] for side in sides)
    return overlap_of_lines(*lines, similarity=SIMILARITY if similarity is None else similarity, min_words=min_words)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else []
    if not found:
        raise DataMissing(f"There is no file {path}, nor a folder of that name with files in it.")
    return [p for p in found if p.suffix == ".bin"] or found  # beside CIFAR-10's batches lie texts about them


def outside_run_folders(path: Path) -> Path:
    """`path`, if it is new and in no run folder: what is there may be published, a report of overlaps may not."""
    require(path.parent.is_dir(), "folder of --out", str(path.parent), "to exist")
    require(not path.exists(), "--out", str(path), "to be the name of a new file")
    for parent in path.resolve().parents:
        run = RunFolder(parent)
        if any(file.exists() for file in (run.statement, run.ledger, run.checkpoint)):
            raise ConfigError(
                f"Expected --out={str(path)!r} outside run folders, and {parent} is one. What is found here is outside "
                "the privacy guarantee, and a run folder may be published. Keep it with the private data."
            )
    return path
