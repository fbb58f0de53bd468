"""The two sets as files: lines of text, tables, or batches in the binary format of CIFAR-10."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from halfsilver.errors import ConfigError, DataMissing, require
from halfsilver.overlap.images import CORRELATION, overlap_of_images
from halfsilver.overlap.match import Overlap
from halfsilver.overlap.tables import CELLS, is_number, overlap_of_rows
from halfsilver.overlap.text import MIN_WORDS, SIMILARITY, overlap_of_lines
from halfsilver.runs.folder import RunFolder
from halfsilver.tasks import files

_KINDS = {".bin": "images", ".csv": "tables", ".tsv": "tables"}
_SEPARATORS = ",;\t|"

Table = list[list[str]]


def overlap_of_files(
    private: Path, public: Path, *, similarity: float | None = None, min_words: int = MIN_WORDS
) -> Overlap:
    """Compare two files or folders: images (``.bin``), tables (``.csv``, ``.tsv``), else text with one record per line.

    Records are numbered from 0, and the files of a folder follow each other by name. Empty lines of a text have numbers
    too. Rows of a table are numbered below its header, and empty lines are no rows.

    Tables are compared by the columns that all of them name in their first line, in any order. Where a first line holds
    a number it is a row, and columns are compared by position.

    Args:
        private: The private file or folder.
        public: The public file or folder, of the same kind.
        similarity: The least that makes a pair near, in (0, 1]. Default None, which means 0.5 of all word triples, 0.9
            of all cells, or a correlation of 0.95.
        min_words: Lines of text with fewer words are left aside, at least 3. Default 8.

    Returns:
        The overlap, which is not private.

    Raises:
        DataMissing: If a file is missing or cannot be read.
        ConfigError: If the files are of different kinds, or if an option is out of range.
    """
    sides = [_files(path) for path in (private, public)]
    kinds = {_kind(path) for side in sides for path in side}
    wanted = "to be of one kind: all images (.bin), all tables (.csv, .tsv) or all text"
    require(len(kinds) == 1, "files", [str(private), str(public)], wanted)
    if kinds == {"tables"}:
        names, rows = _by_columns([[_table(path) for path in side] for side in sides])
        return overlap_of_rows(*rows, similarity=CELLS if similarity is None else similarity, columns=names)
    if kinds == {"images"}:
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
    return [p for p in found if _kind(p) != "text"] or found  # beside CIFAR-10's batches lie texts about them


def _kind(path: Path) -> str:
    return _KINDS.get(path.suffix.lower(), "text")


def _table(path: Path) -> Table:
    """All lines that have cells; what separates them is what the first line has most of."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            separator = "\t" if path.suffix.lower() == ".tsv" else max(_SEPARATORS, key=first.count)
            rows = [row for row in csv.reader(file, delimiter=separator) if row]
    except (UnicodeDecodeError, csv.Error) as error:  # the former is not shown: it quotes the text
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise DataMissing(f"The table {path} cannot be read: {why}.") from None
    if not rows:
        raise DataMissing(f"The table {path} has no rows. Expected a line with names of columns, and rows below it.")
    return rows


def _by_columns(sides: list[list[Table]]) -> tuple[list[str], list[Table]]:
    """The columns that all tables have, and the rows of both sides with the cells of those, in one order."""
    tables = [table for side in sides for table in side]
    if any(is_number(cell) for table in tables for cell in table[0]):
        width = len(tables[0][0])
        return [str(k + 1) for k in range(width)], [[row for table in side for row in table] for side in sides]
    heads = [[name.strip() for name in table[0]] for table in tables]
    names = [name for name in heads[0] if name and all(head.count(name) == 1 for head in heads)]
    if not names:  # not shown: without names the first line is a private row
        raise ConfigError(
            "Expected the first lines of the tables to be names of columns, at least one of them in all tables."
        )
    return names, [[row for table in side for row in _cells(table, names)] for side in sides]


def _cells(table: Table, names: list[str]) -> Iterator[list[str]]:
    head = [name.strip() for name in table[0]]
    places = [head.index(name) for name in names]
    return ([row[k] if k < len(row) else "" for k in places] for row in table[1:])


def outside_run_folders(path: Path) -> Path:
    """Return `path` if it is new and in no run folder. A run folder may be published, and a report of overlaps may not.

    Args:
        path: The file to be written.

    Returns:
        The same path.

    Raises:
        ConfigError: If the file exists, if its folder does not, or if it is in a run folder.
    """
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
