"""`halfsilver report`: pages that are whole, safe and offline, and figures that are the same every time."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import halfsilver as hs
from halfsilver import report
from halfsilver.errors import CheckpointCorrupt, ConfigError
from halfsilver.report import write_report
from halfsilver.report.figures import Picture
from halfsilver.report.load import load
from halfsilver.report.page import Html, inline, tag
from halfsilver.report.parts import guarantee
from halfsilver.report.study_page import study_page as typed_page
from halfsilver.report.words import slug
from halfsilver.runs.folder import RunFolder, read_json, write_json
from halfsilver.study.records import Result, Summary
from halfsilver.study.verdict import verdict as typed_verdict

STEPS = 100
ENDS = {"public": 0.6, "cold": 0.8, "warm": 0.5, "pda": 0.45}
SETTINGS = {"cold": (2.0, None), "warm": (0.5, None), "pda": (0.5, 0.9)}
VOID = {"meta", "br", "img", "link", "hr", "input"}


def verdict(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return typed_verdict([Result.from_json(run) for run in runs]).to_json()


def study_pictures(study: dict[str, Any]) -> dict[str, list[Picture]]:
    return report.study_pictures(Summary.from_json(study))


def study_page(study: dict[str, Any], pictures: Mapping[str, list[Picture]]) -> Html:
    return typed_page(Summary.from_json(study), pictures)


def make_run(method: str, seed: int) -> dict[str, Any]:
    private = method != "public"
    start, end = 3.8 if method == "cold" else 0.6, ENDS[method] + 0.003 * seed * (1 + list(ENDS).index(method) / 9)
    losses = [end + (start - end) * math.exp(-6 * k / 10) for k in range(11 if private else 1)]
    lr, alpha = SETTINGS.get(method, (None, None))
    trace = [{"step": s, "lr": lr, "alpha": 1 - s / 1000, "released_norm": 1.5} for s in range(1, STEPS, 10)]
    return {
        "method": method,
        "seed": seed,
        "setting": {"lr": lr, "alpha_end": alpha} if private else None,
        "epsilon": {"pld": 0.4798 if private else 0.0, "rdp": 0.5312 if private else 0.0},
        "delta": 1e-6,
        "noise_multiplier": 2.84 if private else None,
        "steps": STEPS if private else 0,
        "final": {"loss": end, "accuracy": 1 - end / 3},
        "curve": [{"step": 10 * k, "loss": v, "accuracy": 1 - v / 4} for k, v in enumerate(losses)],
        "trace": trace if private else [],
        "seconds": 60.0,
        "stamps": [],
    }


def make_choice(lr: float, alpha: float | None) -> dict[str, Any]:
    tried = [{"setting": {"lr": lr * k, "alpha_end": alpha}, "loss": 0.5 + 0.1 * k} for k in (1, 2)]
    tried.append({"setting": {"lr": lr * 4, "alpha_end": alpha}, "loss": None})  # diverged
    best, second = tried[0]["setting"], tried[1]["setting"]
    certain = {"runner_up": second, "difference": 0.1, "standard_error": 0.0123, "at_edge": True}
    return {"setting": best, "tried": tried, **certain}


def make_summary() -> dict[str, Any]:
    runs = [make_run(method, seed) for method in ENDS for seed in range(3)]
    plan = hs.PrivacyPlan(steps=STEPS, sampling_rate=0.01, expected_batch_size=500, noise_multiplier=2.84)
    return {
        "schema_version": 1,
        "task": "emnist",
        "recipe": {"name": "workstation", "batch_size": 500, "grid": {"warm": [0.5, 1.0]}},
        "epsilon": 0.48,
        "delta": 1e-6,
        "seeds": dict.fromkeys(ENDS, 3),
        "search": "paper search",
        "quick": False,
        "plan": plan.to_dict(),
        "population": 48_000,
        "problem": {"public rows": 2000},
        "versions": {"halfsilver": "0.1.0"},
        "choices": {method: make_choice(*setting) for method, setting in SETTINGS.items()},
        "runs": runs,
        "ledger": {"runs": 22, "epsilon": 1.9321, "delta": 2e-6, "accountant": "rdp"},
        "verdict": verdict(runs),
        "stamps": ["search not accounted: by private runs"],
    }


@pytest.fixture
def summary() -> dict[str, Any]:
    return make_summary()


@pytest.fixture(scope="module")
def pictures() -> dict[str, list[Picture]]:
    """Drawn once: it is the drawing that takes time."""
    return study_pictures(make_summary())


class Reader(HTMLParser):
    """Tags that do not match, references to elsewhere, repeated ids, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        self.faults += [f"<{name}> is not closed" for name in self.open]
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self._attributes(name, attributes)
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self._attributes(name, attributes)

    def handle_endtag(self, name: str) -> None:
        if not self.open or self.open.pop() != name:
            self.faults.append(f"</{name}> does not match")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def _attributes(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(name)
        for key, value in attributes:
            if key in ("src", "href", "xlink:href", "srcset", "action") and not (value or "").startswith("#"):
                self.faults.append(f"<{name} {key}={value!r}>")
            if key.startswith("on"):
                self.faults.append(f"<{name} {key}>")
            if key == "id":
                self.ids.append(value or "")


def read(page: str) -> Reader:
    found = Reader(page)
    assert found.faults == []
    assert len(set(found.ids)) == len(found.ids)
    assert not {"script", "iframe", "link", "img", "object", "embed"} & set(found.tags)
    assert not re.search(r"@import|@font-face|url\((?!#)", page)
    assert "<!DOCTYPE" not in page[1:]
    return found


def test_the_reader_sees_faults() -> None:
    assert Reader("<p><b></p>").faults
    assert Reader('<img src="https://example.org/x.png">').faults
    assert Reader('<p onclick="x()">').faults
    assert not Reader("<p><b>x</b></p>").faults


def test_a_study_in_order(summary: dict[str, Any], pictures: dict[str, list[Picture]]) -> None:
    found = read(study_page(summary, pictures))
    parts = ["methods", "meaning", "curves", "privacy", "ledger", "schedules", "search", "configuration"]
    assert [name for name in found.ids if name in parts] == parts
    text = found.text
    assert text.index("emnist at epsilon 0.48") < text.index(summary["verdict"]["headline"])
    assert all(sentence in text.replace("\xa0", " ") for sentence in summary["verdict"]["sentences"])
    for said in (
        "0.48 by PLD (tight), 0.531 by RDP",
        "add-remove-one",
        "1.93 by RDP",
        "search not accounted: by private runs",
        "0.1000 (0.0123)",
        "halfsilver compare emnist --epsilon 0.48 --delta 1e-6 --recipe workstation --seeds 3 --search paper",
    ):
        assert said in text
    mean = summary["verdict"]["means"]["pda"]["loss"]
    assert f"{mean['mean']:.4f} ± {(mean['high'] - mean['low']) / 2:.4f}" in text


def test_files_are_the_same_every_time(
    summary: dict[str, Any], pictures: dict[str, list[Picture]], tmp_path: Path
) -> None:
    write_json(tmp_path / "emnist-eps0.48.json", summary)
    path = write_report(tmp_path / "emnist-eps0.48.json")
    assert path == tmp_path / "emnist-eps0.48" / "report.html"
    shown = [one for part in pictures.values() for one in part]
    before = {file: file.read_bytes() for one in shown for file in one.write(tmp_path / "before")}
    wanted = [f"{kind}-{metric}" for kind in ("curve", "difference", "final") for metric in ("accuracy", "loss")]
    wanted += ["curve-accuracy-near", "curve-loss-near", "alpha", "lr", "search"]
    assert sorted(file.name for file in before) == sorted(f"{n}.{ending}" for n in wanted for ending in ("png", "svg"))
    for file, content in before.items():
        assert content == (path.parent / "figures" / file.name).read_bytes()
        assert b"dc:date" not in content
        assert b"Matplotlib v" not in content
        assert content.startswith(b"\x89PNG" if file.suffix == ".png" else b"<?xml")
    assert path.read_text(encoding="utf-8") == study_page(read_json(tmp_path / "emnist-eps0.48.json"), pictures)


def test_figures_have_words_for_those_who_do_not_see_them(
    summary: dict[str, Any], pictures: dict[str, list[Picture]]
) -> None:
    page = study_page(summary, pictures)
    shown = [one for part in pictures.values() for one in part]
    assert page.count('<svg role="img" aria-label="') == len(shown) == 11
    loss = next(one for one in shown if one.name == "curve-loss")
    last = [make_run("pda", seed)["curve"][-1]["loss"] for seed in range(3)]
    assert f"pda {sum(last) / 3:.4f}" in loss.alt


def evil(value: Any) -> Any:
    """Every text in a JSON value, with markup at its end."""
    if isinstance(value, dict):
        return {f"{k}<i>" if k == "public rows" else k: evil(v) for k, v in value.items()}
    if isinstance(value, list):
        return [evil(v) for v in value]
    return f"""{value}<script>alert("1" & '2')</script>""" if isinstance(value, str) else value


def test_all_strings_are_escaped(summary: dict[str, Any]) -> None:
    changed = {**evil(summary), "runs": [{**run, "method": f"{run['method']}<b>$x$"} for run in summary["runs"]]}
    page = study_page(changed, study_pictures(changed))
    found = read(page)
    assert "<script" not in page
    assert "<i>" not in page
    assert "emnist<script>alert(" in found.text
    assert "pda<b>$x$" in found.text
    assert tag("p", "<b>", Html("<b></b>"), title='"') == '<p title="&quot;">&lt;b&gt;<b></b></p>'


# Names that are also paths, markup, formulas, format strings, other spellings of one file, or nothing to look at.
NAMES = (
    *(
        "val/error",
        "../../outside",
        "/nowhere/outside",
        "..",
        ".",
        "",
        "a\\1",
        "%s{0}",
        "x" * 5000,
        "F1",
        "f1",
        "val error",
    ),
    *('x"><img src=x onerror=alert(1)>', "<script>alert(1)</script>", "--><b>", "]]><b>", "</title><b>", "'>\"<b>"),
    *(
        r"$\frac{$",
        "$$",
        "_hidden",
        "\x00",
        "\x1b[31m",
        "\ud800",
        "loss-near",
        "fehler\n<i>",
        "\u7cbe\u5ea6",
        "CON",
        "lr ",
    ),
)
some_name = st.sampled_from(NAMES) | st.text(max_size=12) | st.text("<>&\"'/.\\$-_ab", max_size=12)
few = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def check_markup(page: str) -> None:
    """None but the elements of a report."""
    own = "html head meta title style body main section h1 h2 h3 p a span strong small ul li dl dt dd div pre figure"
    own += " figcaption details summary table thead tbody tr th td svg defs clippath g path rect use"
    assert set(read(page).tags) <= set(own.split())


def check_report(work: Path, source: Path) -> None:
    """A report of `source` in `work`: all of its files in the folder, and of its markup none from a name."""
    home = work / "home" / "deep"
    home.mkdir(parents=True, exist_ok=True)
    before = files_in(work)
    page = write_report(source, home / "report")
    made = files_in(work) - before
    assert page in made
    assert all(path.parent in (home / "report", home / "report" / "figures") for path in made)
    check_markup(page.read_text(encoding="utf-8"))
    shutil.rmtree(home / "report")


@pytest.mark.paper
@few
@given(names=st.lists(some_name, min_size=1, max_size=4, unique=True), place=st.integers(0, 2))
def test_names_of_a_run_are_neither_paths_nor_markup(
    run_dir: Path, tmp_path: Path, names: list[str], place: int
) -> None:
    work = tmp_path / "run"
    work.mkdir(exist_ok=True)
    for name in ("config.json", "statement.json", "metrics.jsonl"):
        (work / name).write_bytes((run_dir / name).read_bytes())
    found = dict.fromkeys(names, 0.5)
    if place == 0:
        write_json(work / "config.json", read_json(work / "config.json") | found | {"inside": found})
    if place == 1:
        write_json(work / "statement.json", read_json(work / "statement.json") | found | {"plan": found})
    (work / "metrics.jsonl").write_text("".join(json.dumps({**found, "step": s}) + "\n" for s in (1, 2)))
    check_report(tmp_path, work)


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {names.get(k, k): renamed(v, names) for k, v in value.items()}
    if isinstance(value, list):
        return [renamed(v, names) for v in value]
    return names.get(value, value) if isinstance(value, str) else value


def with_names(study: dict[str, Any], new: list[str]) -> dict[str, Any]:
    """Other names for task, recipe, two methods and two metrics, in all places where they stand."""
    old = ("emnist", "workstation", "pda", "warm", "loss", "accuracy")
    changed = renamed(study, dict(zip(old, new, strict=True)))
    assert isinstance(changed, dict)
    return changed


six_names = st.lists(some_name, min_size=6, max_size=6, unique=True)


@given(new=six_names)
def test_names_of_a_study_are_not_markup(new: list[str]) -> None:
    check_markup(study_page(with_names(make_summary(), new), {}))


@pytest.mark.paper
@settings(few, max_examples=6)
@given(new=six_names)
def test_names_of_a_study_are_not_paths(tmp_path: Path, new: list[str]) -> None:
    study = make_summary()
    study["runs"] = [make_run(method, seed) for method in ("warm", "pda") for seed in (0, 1)]
    study["verdict"] = verdict(study["runs"])
    write_json(tmp_path / "study.json", with_names(study, new))
    check_report(tmp_path, tmp_path / "study.json")


@given(names=st.lists(some_name, min_size=2, max_size=2, unique=True))
def test_two_names_never_share_a_file(names: list[str]) -> None:
    first, second = map(slug, names)
    assert first.casefold() != second.casefold(), "there are file systems that take both for one"
    for made in (first, second):
        assert re.fullmatch(r"[a-z0-9_][a-z0-9_.]*", made), "no hyphen: it joins the parts of a name"
        assert len(made) < 100
    assert slug("loss") == "loss"


def test_a_metric_may_have_a_slash_in_its_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    plan = hs.PrivacyPlan(steps=2, sampling_rate=0.5, expected_batch_size=20, noise_multiplier=1.0)
    trainer = hs.Trainer(
        model,
        lambda model, batch: model(batch).squeeze(1).square(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        plan=plan,
        metrics={"val/error": lambda model, batch: model(batch).squeeze(1).abs()},
        progress=False,
    )
    trainer.fit(torch.randn(40, 4), run_dir=tmp_path, delta=1e-3, test=torch.randn(5, 4))
    found = read(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Test val/error" in found.text
    assert any(path.name.startswith("val_error.") for path in (tmp_path / "figures").iterdir())


def test_correlated_noise_is_described_by_who_takes_part() -> None:
    fields = {"unit": "user", "sampling_rate": 0.1, "noise_multiplier": 2.0, "noise": {"separation": 10}}
    shown = guarantee(fields, {"pld": 1.0, "rdp": 1.1}, 1e-5, "add-remove-one")
    assert "each user at most once in 10 steps" in shown
    assert "noise multiplier of the whole run" in shown
    assert "sampling rate" not in shown
    assert "sampling rate" in guarantee({**fields, "noise": None}, {"pld": 1.0, "rdp": 1.1}, 1e-5, "add-remove-one")


def test_links_do_not_lead_out_of_the_folder(run_dir: Path, tmp_path: Path) -> None:
    """A run folder may come from somebody else, with links in it to files of whoever looks at it."""
    run, home = tmp_path / "run", tmp_path / "home"
    shutil.copytree(run_dir, run)
    shutil.rmtree(run / "figures", ignore_errors=True)
    home.mkdir()
    (run / "figures").symlink_to(home)
    with pytest.raises(ConfigError, match="leads out of"):
        write_report(run)
    (run / "figures").unlink()
    (run / "figures").mkdir()
    (home / "mine").write_text("mine")
    for name in ("figures/loss.svg", "figures/loss.png", "report.html"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(home / "mine")
    write_report(run)
    assert [path.name for path in home.iterdir()] == ["mine"]
    assert (home / "mine").read_text() == "mine"


def test_a_page_allows_its_own_style_and_nothing_else(run_dir: Path) -> None:
    head = write_report(run_dir).read_text(encoding="utf-8").split("<style>")[0]
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="([^"]*)">', head)
    rules = dict(rule.split(" ", 1) for rule in html.unescape(policy).split("; "))
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert rules == {**nothing, "style-src": "'unsafe-inline'"}


@pytest.mark.paper
def test_files_of_another_kind_are_a_typed_error(run_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "statement.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run_dir / name).read_bytes())
    for wrong in ({"plan": [1]}, {"plan": "x"}, {"not_private_because": 3}, {"spent_so_far": {"steps": "x"}}):
        write_json(tmp_path / "statement.json", read_json(run_dir / "statement.json") | wrong)
        with pytest.raises(CheckpointCorrupt, match="cannot be shown"):
            write_report(tmp_path)


@pytest.mark.parametrize(
    "missing",
    [(name,) for name in ("ledger", "plan", "recipe", "problem", "seeds", "task", "epsilon")]
    + [("runs",), ("runs", "choices", "verdict", "ledger", "plan", "recipe", "stamps", "delta")],
    ids=" ".join,
)
def test_missing_parts_do_not_break_it(summary: dict[str, Any], missing: tuple[str, ...]) -> None:
    rest = {name: value for name, value in summary.items() if name not in missing}
    for study in (rest, rest | dict.fromkeys(missing)):
        found = read(study_page(study, study_pictures(study) if "runs" in missing else {}))
        assert "h1" in found.tags
        assert "None" not in found.text


def test_a_study_without_verdict_has_its_curves(summary: dict[str, Any]) -> None:
    run = {**make_run("pda", 0), "final": {"loss": 0.45}}
    pictures = study_pictures({**summary, "runs": [run], "verdict": None, "choices": None})
    names = {part: [one.name for one in found] for part, found in pictures.items()}
    drawn = {"curves": ["curve-loss"], "finals": ["final-loss"], "schedules": ["alpha", "lr"]}
    assert names == {"differences": [], "search": [], **drawn}


def test_one_seed_has_no_interval(summary: dict[str, Any]) -> None:
    runs = [make_run(method, 0) for method in ENDS]
    runs[1]["curve"], runs[1]["final"] = [], {"loss": None, "accuracy": None}  # diverged
    study = {**summary, "runs": runs, "verdict": verdict(runs), "quick": True, "stamps": []}
    found = read(study_page(study, study_pictures(study)))
    assert "none: one seed" in found.text
    assert "cold DP-SGD from random weights diverged diverged 0.48 1" in found.text
    assert "±" not in found.text.replace("Mean over seeds ±", "")
    assert "Stamped: quick" in found.text
    assert "--quick" in found.text


def test_an_unfinished_study(summary: dict[str, Any], tmp_path: Path) -> None:
    about = {k: v for k, v in summary.items() if k not in ("runs", "verdict", "ledger", "choices", "stamps")}
    (tmp_path / "runs/warm-seed-0").mkdir(parents=True)
    write_json(tmp_path / "study.json", about)
    write_json(tmp_path / "runs/warm-seed-0/result.json", make_run("warm", 0))
    found = read(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "not finished" in found.text
    assert "search not accounted" in found.text
    assert "DP-SGD from the public model" in found.text


def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of a few steps."""
    folder = tmp_path_factory.mktemp("runs") / "small<run>"
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    x = torch.randn(60, 3)
    data = (x, (x[:, 0] > 0).long())
    plan = hs.PrivacyPlan(steps=6, sampling_rate=0.5, expected_batch_size=30, noise_multiplier=2.0)
    trainer = hs.Trainer(
        model, loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), plan=plan, unsafe_seed=1, progress=False
    )
    test = tuple(t.clone() for t in data)
    trainer.fit(data, run_dir=folder, test=test, test_every=2, delta=1e-5)
    return folder


def test_a_run(run_dir: Path) -> None:
    path = write_report(run_dir)
    found = read(path.read_text(encoding="utf-8"))
    statement = json.loads((run_dir / "statement.json").read_text())
    assert f"{statement['epsilon_planned']['pld']:.3g} by PLD (tight)" in found.text
    assert "unsafe_seed: noise and sampling can be reproduced" in found.text
    assert "was planned to be" in found.text
    assert "But it is not private" in found.text
    assert "times as likely" not in found.text, "a promise that is not kept is not explained"
    assert f"Last measured on test rows: loss {last_loss(run_dir):.4f}." in found.text
    assert "NoneType" not in found.text
    assert "small<run>" in found.text
    names = {p.name for p in (run_dir / "figures").iterdir()}
    assert names == {f"{name}.{ending}" for name in ("loss", "lr", "released_norm") for ending in ("png", "svg")}


def last_loss(run_dir: Path) -> float:
    (*_, last) = [line for line in RunFolder(run_dir).history() if "loss" in line]
    return float(last["loss"])


def test_a_run_without_stamps_says_what_it_promises(run_dir: Path, tmp_path: Path) -> None:
    statement = read_json(run_dir / "statement.json") | {"not_private_because": []}
    write_json(tmp_path / "config.json", read_json(run_dir / "config.json"))
    write_json(tmp_path / "statement.json", statement)
    text = read(write_report(tmp_path).read_text(encoding="utf-8")).text
    factor = math.exp(statement["epsilon_planned"]["pld"])
    assert f"This run is ({statement['epsilon_planned']['pld']:.3g}, 1e-5)-differentially private." in text
    assert f"with one example more or less it would be at most {factor:.3g} times as likely" in text
    write_json(tmp_path / "statement.json", statement | {"spent_so_far": {"steps": 5}})
    assert "This run was planned to be" in read(write_report(tmp_path).read_text(encoding="utf-8")).text


def test_a_run_without_metrics(run_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "statement.json"):
        (tmp_path / name).write_bytes((run_dir / name).read_bytes())
    assert read(write_report(tmp_path).read_text(encoding="utf-8")).ids == ["privacy", "ledger", "configuration"]


def test_a_run_that_has_not_ended(run_dir: Path, tmp_path: Path) -> None:
    """Its statement is that of its start: a reader must not take the small totals for the truth."""
    for name in ("config.json", "statement.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run_dir / name).read_bytes())
    assert "not finished" not in read(write_report(tmp_path).read_text(encoding="utf-8")).text
    statement = read_json(tmp_path / "statement.json")
    statement["spent_so_far"] = {"steps": 0, "epsilon_pld": 0.0}
    write_json(tmp_path / "statement.json", statement)
    found = read(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "not finished: the run has logged step 6, but its statement and the totals are those of step 0" in found.text


def test_other_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"study\.json"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="study"):
        load(tmp_path / "nothing")
    write_json(tmp_path / "config.json", {})
    with pytest.raises(ConfigError, match="'runs'"):
        load(tmp_path / "config.json")


def test_inline_figures_take_the_colours_of_the_page(pictures: dict[str, list[Picture]]) -> None:
    one = pictures["curves"][0]
    assert "fill: #ffffff" in one.svg, "alone it has a white ground"
    markup = inline(one.svg, name="x", alt="y")
    assert "var(--arm-4)" in markup
    assert "currentColor" in markup
    assert not re.findall(r"#[0-9a-f]{6}\b", markup), "a fixed colour may vanish on a dark page"


def test_it_is_imported_without_matplotlib() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import halfsilver.report"
    code += "\nfrom halfsilver.study.records import Result, StudyRecord, Summary"
    code += "\nstudy = Summary(study=StudyRecord(), runs=[Result(method='pda', final={'loss': 1.0})])"
    code += "\ntry: halfsilver.report.study_pictures(study)"
    code += "\nexcept halfsilver.errors.MissingExtra as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'halfsilver[bench]'" in done.stdout
