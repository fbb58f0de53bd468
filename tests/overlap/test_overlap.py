"""The custodian's tool: finds copies and near copies, says that it is not private, and stays out of run folders."""

from __future__ import annotations

import ast
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.robustness import overlap as benchmark
from halfsilver.cli import app as cli
from halfsilver.errors import ConfigError, DataMissing
from halfsilver.overlap import overlap_of_images, overlap_of_lines, overlap_of_rows
from tools.architecture import PACKAGE, imports

WORDS = [f"w{i}" for i in range(500)]


def lines(n: int, seed: int, length: int = 30) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    return [[WORDS[k] for k in rng.integers(0, len(WORDS), length)] for _ in range(n)]


def images(n: int, seed: int) -> np.ndarray:
    """Noise of 6 x 6 spots, smooth as photographs are: 32 x 32 pixels in three colours."""
    rng = np.random.default_rng(seed)
    spots = np.arange(32)[:, None] / 31 * 5 - np.arange(6)
    blend = np.maximum(0, 1 - np.abs(spots))
    grey = blend @ rng.uniform(0, 255, (n, 1, 6, 6)) @ blend.T
    levels: np.ndarray = np.clip(grey * 0.8 + rng.uniform(0, 40, (n, 3, 1, 1)), 0, 255).astype(np.uint8)
    return levels


def invoke(*words: object) -> Any:
    return CliRunner().invoke(cli.app, ["overlap", *map(str, words)])


# ---- text


def test_exact_and_near_lines_are_found_and_strangers_are_not() -> None:
    private, public = lines(200, 0), lines(50, 1)
    private[10], private[11] = public[3], public[3]
    private[20] = [*public[7][:14], "other", *public[7][15:]]  # 25 of 31 triples in common
    found = overlap_of_lines(private, public)
    assert {i: (m.exact, m.record) for i, m in found.private.matches.items()} == {
        10: (True, 3),
        11: (True, 3),
        20: (False, 7),
    }
    assert found.private.matches[20].similarity == pytest.approx(25 / 31)
    assert {j: m.record for j, m in found.public.matches.items()} == {3: 10, 7: 20}
    assert found.figures()["private"] == {"compared": 200, "left_aside": 0, "exact": 2, "near": 1, "share": 3 / 200}


def test_the_least_similarity_is_kept_to() -> None:
    private, public = lines(1, 0), lines(1, 0)
    private[0][14] = "other"
    assert overlap_of_lines(private, public, similarity=0.8).private.matches
    assert not overlap_of_lines(private, public, similarity=0.81).private.matches


def test_short_lines_are_left_aside() -> None:
    found = overlap_of_lines([["a"] * 7, [], ["a"] * 8], [["a"] * 7, ["a"] * 8])
    assert found.figures()["private"] == {"compared": 1, "left_aside": 2, "exact": 1, "near": 0, "share": 1.0}


def test_nothing_to_compare_is_an_error() -> None:
    """0 of 0 records would read as if there were no overlap."""
    short, long = [["a"] * 7, []], [["a"] * 8]
    for private, public, side in ((short, long, "private"), (long, short, "public"), ([], long, "private")):
        with pytest.raises(ConfigError, match=f"{side} .*at least 8 words"):
            overlap_of_lines(private, public)
    with pytest.raises(ConfigError, match=r"private .*images"):
        overlap_of_images(images(1, 0)[:0], images(1, 0))
    with pytest.raises(ConfigError, match=r"public .*rows"):
        overlap_of_rows([["1", "2"]], [["", " "]])


@pytest.mark.parametrize("options", [{"similarity": 0.0}, {"similarity": 1.5}, {"min_words": 2}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        overlap_of_lines(lines(1, 0), lines(1, 1), **options)


# ---- images


def test_images_are_found_again_when_moved_or_brightened() -> None:
    private, public = images(300, 0), images(40, 1)
    private[5] = public[0]
    planted = [private[6:13], private[13:20]]
    planted[0][...] = np.roll(public[1:8], 1, axis=3)
    planted[1][...] = np.clip(public[8:15].astype(int) + 25, 0, 255)
    found = overlap_of_images(private, public)
    assert {i: m.record for i, m in found.private.matches.items()} == {5 + k: k for k in range(15)}
    assert [i for i, m in found.private.matches.items() if m.exact] == [5]


def test_an_image_without_contrast_is_like_no_other() -> None:
    flat = [np.full((1, 3, 32, 32), value, np.uint8) for value in (0, 255)]
    assert not overlap_of_images(flat[0], flat[1]).private.matches
    assert overlap_of_images(flat[0], flat[0]).private.matches[0].exact


def test_images_of_other_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="shapes of the images"):
        overlap_of_images(images(1, 0), images(1, 0)[:, :1])
    with pytest.raises(ConfigError, match="at least 16"):
        overlap_of_images(images(1, 0)[..., :8], images(1, 0)[..., :8])


# ---- tables


def test_rows_are_compared_cell_by_cell() -> None:
    rng = np.random.default_rng(0)
    private = [[str(v) for v in rng.integers(0, 1000, 10)] for _ in range(300)]
    public = [[str(v) for v in rng.integers(0, 1000, 10)] for _ in range(100)]
    private[5] = [f" {v}.0" for v in public[9]]  # the same numbers, written otherwise
    private[6] = [*public[10][:4], "other", *public[10][5:]]  # 9 of 10 cells
    private[7] = [*public[11][:4], "two", "others", *public[11][6:]]
    found = overlap_of_rows(private, public)
    assert {i: (m.exact, m.record, m.similarity) for i, m in found.private.matches.items()} == {
        5: (True, 9, 1.0),
        6: (False, 10, 0.9),
    }
    assert set(overlap_of_rows(private, public, similarity=0.8).private.matches) == {5, 6, 7}
    with pytest.raises(ConfigError, match="similarity"):
        overlap_of_rows(private, public, similarity=0.0)
    with pytest.raises(ConfigError, match="cells"):
        overlap_of_rows([["1", "2"]], [["1"]])


@given(
    rows=st.lists(st.lists(st.sampled_from("abc"), min_size=6, max_size=6), min_size=1, max_size=8),
    others=st.lists(st.lists(st.sampled_from("abc"), min_size=6, max_size=6), min_size=1, max_size=8),
    similarity=st.sampled_from([0.3, 0.5, 2 / 3, 0.9, 1.0]),
)
def test_no_near_row_is_missed(rows: list[list[str]], others: list[list[str]], similarity: float) -> None:
    found = overlap_of_rows(rows, others, similarity=similarity)
    for i, row in enumerate(rows):
        best = max(sum(a == b for a, b in zip(row, other, strict=True)) / 6 for other in others)
        assert (i in found.private.matches) == (best >= similarity)
        assert i not in found.private.matches or found.private.matches[i].similarity == best


# ---- files and command


def table(path: Path, header: list[str], rows: list[list[Any]], separator: str = ",") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([header, *rows])
    return path


def people(n: int, seed: int) -> list[list[Any]]:
    rng = np.random.default_rng(seed)
    return [[f"Name, {i}", int(rng.integers(18, 90)), float(rng.normal()), f"+{rng.integers(10**9)}"] for i in range(n)]


COLUMNS = ["name", "age", "score", "phone"]


def test_tables_are_compared_by_their_rows(tmp_path: Path) -> None:
    """Every row copied, into a table with its columns in another order, another separator and one column more."""
    rows = people(50, 0)
    private = table(tmp_path / "private.csv", COLUMNS, rows)
    for name, separator in (("public.csv", ";"), ("public.tsv", "\t")):
        turned = [[row[2], row[0], "x", row[3], row[1]] for row in rows]
        public = table(tmp_path / name, ["score", "name", "extra", "phone", "age"], turned, separator)
        done = invoke(private, public, "--json")
        figures = json.loads(done.stdout)
        assert (figures["kind"], figures["columns"]) == ("tables", COLUMNS)
        assert figures["private"] == {"compared": 50, "left_aside": 0, "exact": 50, "near": 0, "share": 1.0}
        assert figures["public"]["exact"] == 50
        assert done.exit_code == 3
    shown = invoke(private, private).stdout
    assert "100.00%" in shown
    assert "name, age, score, phone" in " ".join(shown.split())


def test_tables_without_names_of_columns_are_compared_by_position(tmp_path: Path) -> None:
    numbers = [[1, 2.5, 7], [3, 4.5, 8], [5, 6.5, 9]]
    private, public = tmp_path / "a.csv", tmp_path / "b.csv"
    private.write_text("\n\n".join(",".join(map(str, row)) for row in numbers), encoding="utf-8-sig")
    public.write_text("9,9,9\n5,6.50,9\n", encoding="utf-8")
    figures = json.loads(invoke(private, public, "--json").stdout)
    assert figures["columns"] == ["1", "2", "3"]
    assert (figures["private"]["compared"], figures["private"]["exact"]) == (3, 1)


@pytest.mark.nightly
def test_exit_codes_tell_what_was_found(texts: tuple[Path, Path], tmp_path: Path) -> None:
    apart = table(tmp_path / "a.csv", COLUMNS, people(5, 1)), table(tmp_path / "b.csv", COLUMNS, people(5, 2)[3:])
    short = tmp_path / "short.txt"
    short.write_text("a few words\n" * 9)
    for paths, code in ((texts, 3), (apart, 0), ((short, texts[1]), 2)):
        done = subprocess.run(
            [sys.executable, "-m", "halfsilver", "overlap", *map(str, paths)], capture_output=True, text=True
        )
        assert done.returncode == code
        assert ("Expected" in done.stderr) == (code == 2)
    for words in (["--help"], ["overlap", "--help"]):
        assert "3" in CliRunner().invoke(cli.app, words).output.split("Exit code")[1]


def test_tables_that_cannot_be_compared_are_said(tmp_path: Path) -> None:
    one = table(tmp_path / "one.csv", COLUMNS, people(3, 0))
    other = table(tmp_path / "other.csv", ["x", "y"], [[1, 2]])
    empty, broken = tmp_path / "empty.csv", tmp_path / "broken.csv"
    empty.write_text("\n\n")
    broken.write_bytes(b"a,b\n\xff\xfe,1\n")
    header = table(tmp_path / "header.csv", COLUMNS, [])
    huge = table(tmp_path / "huge.csv", ["x"], [["y" * 200_000]])
    cases: list[tuple[Path, type[Exception], str]] = [
        (other, ConfigError, "columns"),
        (empty, DataMissing, "rows"),
        (broken, DataMissing, "UTF-8"),
        (header, ConfigError, "rows"),
        (huge, DataMissing, "131072"),
        (tmp_path / "none.txt", DataMissing, "There is no file"),
    ]
    for path, kind, words in cases:
        error = invoke(one, path).exception
        assert isinstance(error, kind)
        assert words in str(error)
    (tmp_path / "text.txt").write_text("one two three")
    assert isinstance(invoke(one, tmp_path / "text.txt").exception, ConfigError)


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    private, public = lines(30, 0), lines(10, 1)
    private[4] = public[9]
    paths = tmp_path / "private.txt", tmp_path / "public.txt"
    for path, content in zip(paths, (private, public), strict=True):
        path.write_text("\n\n".join(" ".join(line) for line in content), encoding="utf-8")
    return paths


def test_the_command_prints_json_or_a_table_and_says_what_it_is(texts: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "matches.json"
    result = invoke(*texts, "--json", "--out", out)
    figures = json.loads(result.stdout)
    assert figures["not_private"] is True
    assert figures["private"] == {"compared": 30, "left_aside": 29, "exact": 1, "near": 0, "share": 1 / 30}
    assert figures["public"]["share"] == 1 / 10
    report = json.loads(out.read_text())
    assert report.pop("matches") == [
        {"private": 8, "public": 18, "exact": True, "similarity": 1.0}
    ]  # empty lines count
    assert report == figures
    shown = invoke(*texts).stdout
    assert "NOT PRIVATE" in shown
    assert "outside the privacy guarantee" in " ".join(shown.split())
    assert "3.33%" in shown


@pytest.mark.parametrize("name", ["statement.json", "ledger.jsonl", "checkpoint.safetensors"])
def test_no_report_is_written_into_a_run_folder(texts: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    (run / "inside").mkdir(parents=True)
    (run / name).touch()
    (tmp_path / "link").symlink_to(run / "inside")
    for out in (run / "x.json", run / "inside" / "x.json", tmp_path / "link" / "x.json"):
        result = invoke(*texts, "--out", out)
        assert isinstance(result.exception, ConfigError)
        assert "run folder" in str(result.exception)
        assert not out.exists()


def test_batches_of_images_are_read(tmp_path: Path) -> None:
    """A folder as it is published, with a text beside the batches, against a single file of a few images."""
    public, private = images(30, 0), images(4, 1)
    private[2] = public[25]
    folder, file = tmp_path / "batches", tmp_path / "some.bin"
    folder.mkdir()
    for name, part in ((folder / "a.bin", public[:20]), (folder / "b.bin", public[20:]), (file, private)):
        name.write_bytes(b"".join(bytes([1]) + image.tobytes() for image in part))
    (folder / "batches.meta.txt").write_text("airplane")
    found = json.loads(invoke(file, folder, "--json").stdout)
    assert (found["kind"], found["private"]["exact"], found["public"]["compared"]) == ("images", 1, 30)


def test_what_cannot_be_compared_is_said(texts: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.bin"
    broken.write_bytes(bytes(3072))
    cases: list[tuple[tuple[Path, Path], type[Exception], str]] = [
        ((texts[0], tmp_path / "absent"), DataMissing, "There is no file"),
        ((texts[0], broken), ConfigError, "of one kind"),
        ((broken, broken), DataMissing, "3,072 bytes, expected 3,073 bytes"),
    ]
    for paths, kind, words in cases:
        error = invoke(*paths).exception
        assert isinstance(error, kind)
        assert words in str(error)


def test_nothing_but_the_command_imports_the_tool() -> None:
    users = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        names = imports(ast.parse(path.read_text(encoding="utf-8")), module)
        if any(name.startswith("halfsilver.overlap") for name in names):
            users.add(module)
    assert {name for name in users if not name.startswith("halfsilver.overlap.")} == {"halfsilver.cli.overlap"}


# ---- real data


def test_planted_images_of_cifar10(data_dir: Path) -> None:
    """A tenth of the private rows; the whole split is `python -m benchmarks.robustness.overlap`."""
    figures = benchmark.planted_images(data_dir, private=4_800, planted=40)
    assert figures["exact_found"] == 1.0
    assert min(figures["shifted_found"], figures["brightness_found"]) >= 0.95
    assert figures["false_alarms"] <= 1e-3


@pytest.mark.nightly
def test_lines_with_unknown_words_are_found_again(data_dir: Path) -> None:
    """2,000 lines of WikiText-2; the whole of it against WikiText-103 is `python -m benchmarks.robustness.overlap`."""
    figures = benchmark.gapped_text(data_dir, lines=2_000)
    assert figures["near_found"] >= 0.95
    assert figures["false_alarms"] <= 1e-2
