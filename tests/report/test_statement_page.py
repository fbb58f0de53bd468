"""The privacy statement in plain words: what it says is in the files, and wrong files get none."""

from __future__ import annotations

import hashlib
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import linprog
from typer.testing import CliRunner

import halfsilver as hs
from halfsilver.cli import app as cli
from halfsilver.errors import HalfsilverError
from halfsilver.report import PlainStatement, write_statement
from halfsilver.report.statement_page import found_at_most

FIXED = {"1", "256"}  # the rate of false alarms, and SHA-256


def run_at(folder: Path, **options: Any) -> Path:
    model = torch.nn.Linear(4, 1)
    plan = hs.PrivacyPlan(steps=12, sampling_rate=0.1, expected_batch_size=10, noise_multiplier=0.8)
    ledger = options.pop("ledger", None)
    trainer = hs.Trainer(
        model,
        lambda m, b: m(b).square().squeeze(1),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        plan=plan,
        **options,
    )
    trainer.fit(torch.randn(100, 4), run_dir=folder, delta=1e-5, ledger=ledger)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    ledger = hs.Ledger.open(folder / "people.jsonl", budget=hs.Budget(epsilon=6.0, delta=1e-5))
    about = {"data set": "visits to <b>clinic</b> 17", "purpose": "a model of waiting times"}
    return run_at(folder / "a", about=about, ledger=ledger)


def numbers(value: Any) -> set[str]:
    """All numbers in a value, in the forms in which a page may show them."""
    if isinstance(value, dict):
        return set().union(*map(numbers, value.values()), *map(numbers, value.keys()))
    if isinstance(value, list):
        return set().union(*map(numbers, value))
    if isinstance(value, str):
        return {value, *re.findall(r"\d[\d.]*", value)}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return set()
    return {
        f"{value:.3g}",
        f"{value:.4g}",
        f"{value:g}",
        f"{value:,}",
        f"{value:.0e}",
        str(value),
        f"{value:g}".replace("e-0", "e-"),
    }


def test_the_page_has_no_number_that_is_not_in_the_files(run: Path) -> None:
    page = write_statement(run).read_text()
    found = PlainStatement.of(run)
    text = html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL))
    epsilon, delta = found.checked["statement"]["epsilon_planned"]["pld"], 1e-5
    derived = {f"{math.exp(epsilon):.3g}", f"{100 * found_at_most(0.01, epsilon, delta):.3g}", "100"}
    config = json.loads((run / "config.json").read_text())
    known = numbers(found.checked) | numbers(config) | derived | FIXED
    for digest in found.checked["sha256"].values():
        assert digest in text
        text = text.replace(digest, "")
    text = text.replace(found.checked["run_id"], "")
    shown = {number.rstrip(".,") for number in re.findall(r"\d[\d.,e-]*", text)}
    assert {f"{epsilon:.3g}", "6", "12", "17"} <= shown
    assert shown <= known, shown - known


def test_names_do_not_become_markup(run: Path) -> None:
    page = write_statement(run).read_text()
    assert "<b>" not in page
    assert "visits to &lt;b&gt;clinic&lt;/b&gt; 17" in page


def test_digests_are_those_of_the_files(run: Path) -> None:
    found = PlainStatement.of(run).checked["sha256"]
    files = [run / name for name in ("config.json", "statement.json", "checkpoint.safetensors", "model.safetensors")]
    assert found == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (*files, run.parent / "people.jsonl")
    }


def test_text_and_page_say_the_same(run: Path) -> None:
    found = PlainStatement.of(run)
    page, text = html.unescape(found.html().replace("&nbsp;", " ")), " ".join(str(found).split())
    for part in found.parts:
        for words in (part.heading, *part.sentences, *(value for _, value in part.facts)):
            assert " ".join(words.split()) in text
            assert words in page


def test_a_run_that_does_not_verify_gets_no_page(run: Path, tmp_path: Path) -> None:
    bad = run_at(tmp_path / "bad")
    statement = json.loads((bad / "statement.json").read_text())
    statement["epsilon_planned"]["pld"] /= 2
    (bad / "statement.json").write_text(json.dumps(statement))
    with pytest.raises(HalfsilverError):
        write_statement(bad)
    assert not (bad / "statement.html").exists()


def test_what_takes_the_guarantee_away_comes_first(tmp_path: Path) -> None:
    found = PlainStatement.of(run_at(tmp_path / "seeded", unsafe_seed=1))
    assert "not private" in found.claim
    text = str(found)
    assert "Not private: unsafe_seed" in text
    assert "times as likely" not in text


@pytest.mark.parametrize(("epsilon", "delta", "alarms"), [(0.3, 1e-5, 0.01), (2.0, 1e-3, 0.01), (8.0, 1e-6, 0.01)])
def test_power_is_that_of_the_best_test(epsilon: float, delta: float, alarms: float) -> None:
    """Oracle: a linear program for the best test of the mechanism with four outputs that is the worst case.

    Its outputs have probabilities (delta, 0, a e^epsilon, a) and (0, delta, a, a e^epsilon), a = (1 - delta) / (1 +
    e^epsilon); see Kairouz, Oh and Viswanath 2015.
    """
    ratio = math.exp(epsilon)
    share = (1 - delta) / (1 + ratio)
    present, absent = [0.0, delta, share, share * ratio], [delta, 0.0, share * ratio, share]
    best = linprog([-p for p in present], A_ub=[absent], b_ub=[alarms], bounds=[(0, 1)] * 4)
    assert found_at_most(alarms, epsilon, delta) == pytest.approx(-best.fun, rel=1e-6)


def test_the_command(run: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    plain = runner.invoke(cli.app, ["statement", str(run)])
    assert plain.exit_code == 0
    assert "What it does not cover" in plain.output
    as_json = runner.invoke(cli.app, ["statement", str(run), "--json"])
    assert json.loads(as_json.output)["sha256"]
    written = runner.invoke(cli.app, ["statement", str(run), "--out", str(tmp_path / "page.html")])
    assert written.exit_code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("command", ["statement", "verify"])
def test_of_a_folder_above_the_runs_are_named(command: str, run: Path) -> None:
    result = CliRunner().invoke(cli.app, [command, str(run.parent)])
    assert result.exit_code != 0
    assert str(run) in str(result.exception)
