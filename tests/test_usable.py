"""Data sets that cannot be used, and runs that diverge: what may be told of them is told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import halfsilver as hs
from halfsilver.errors import ConfigError, PrivateDataError
from halfsilver.privacy.data import PrivateData
from halfsilver.report import write_report
from halfsilver.runs.verify import verify

EXAMPLE = (torch.zeros(4), torch.tensor(0))


def classes(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Rows(Dataset[Any]):
    """600 rows of which the first `broken` cannot be used, for one of several reasons."""

    def __init__(self, broken: int, why: str = "raises") -> None:
        self.broken, self.why, self.reads = broken, why, 0
        self.x = torch.randn(600, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        x, y = self.x[i], torch.tensor(i % 2)
        if i < self.broken:
            if self.why == "raises":
                raise OSError("no such file")
            x = {"swapped": x[:, None], "nan": x * math.nan}.get(self.why, x)
            y = torch.tensor(99) if self.why == "label" else y
        return x, y


def plan(**changes: Any) -> hs.PrivacyPlan:
    values = {"steps": 5, "spare_steps": 2, "sampling_rate": 0.5, "expected_batch_size": 300, "noise_multiplier": 5.0}
    return hs.PrivacyPlan(**{**values, **changes})


def trainer(plan: hs.PrivacyPlan, lr: float = 0.1, loss_fn: Any = classes) -> hs.Trainer:
    model = nn.Linear(4, 2)
    return hs.Trainer(model, loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=lr), plan=plan)


@pytest.mark.parametrize("why", ["raises", "swapped", "nan", "label"])
def test_a_data_set_that_cannot_be_used_is_told_of_before_the_first_step(tmp_path: Path, why: str) -> None:
    private = PrivateData(Rows(600, why), example=EXAMPLE)
    with pytest.raises(PrivateDataError, match=r"about \d% can be used.*inspect_not_private"):
        trainer(plan()).fit(private, run_dir=tmp_path, check_usable=True)
    (run,) = hs.Ledger.open(tmp_path / "ledger.jsonl").runs.values()
    assert run.spent == 1  # paid for, as one step of the plan


@pytest.mark.parametrize("broken", [0, 1, 60])
def test_single_records_stay_unmentioned(tmp_path: Path, broken: int) -> None:
    private = PrivateData(Rows(broken), example=EXAMPLE)
    result = trainer(plan()).fit(private, run_dir=tmp_path, check_usable=True)
    assert result.stopped == "finished"
    (share,) = [line["usable_share"] for line in result.history if "usable_share" in line]
    assert share == pytest.approx(1 - broken / 600, abs=6 * math.sqrt(25 + 150) / 300)
    (run,) = hs.Ledger.open(tmp_path / "ledger.jsonl").runs.values()
    assert run.spent == 6
    assert verify(tmp_path)["ok"]


@pytest.mark.nightly
def test_the_count_has_the_noise_of_the_plan(tmp_path: Path) -> None:
    """At rate 1 the count itself is fixed, so its spread is the noise: n = 400, chi-square at alpha 1e-6.

    A scale wrong by 1.5 is missed with probability below 1e-7.
    """
    from scipy import stats

    from halfsilver.privacy.ledger import Ledger
    from halfsilver.privacy.mechanism import PrivateGradient

    many = plan(steps=400, sampling_rate=1.0, expected_batch_size=600)
    x = Rows(0).x[:20]
    source = PrivateGradient(
        nn.Linear(4, 2), classes, PrivateData((x, torch.zeros(20, dtype=torch.int64))), many,
        ledger=Ledger.open(tmp_path / "l.jsonl"), run_id="count",
    )  # fmt: skip
    found = torch.tensor([source.usable_units() for _ in range(400)]).double() - 20

    def accepted(sigma: float) -> bool:
        p = stats.chi2(400).cdf(float((found / sigma).square().sum()))
        return bool(min(p, 1 - p) > 5e-7)

    assert accepted(5.0)
    assert not accepted(5.0 * 1.5)
    assert not accepted(5.0 / 1.5)


def test_the_step_is_in_the_ledger_before_a_record_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(0)
    counted = []
    real = hs.Ledger.intend

    def intend(self: Any, *args: Any, **options: Any) -> Any:
        counted.append(rows.reads)
        return real(self, *args, **options)

    monkeypatch.setattr(hs.Ledger, "intend", intend)
    trainer(plan(steps=1)).fit(PrivateData(rows, example=EXAMPLE), run_dir=tmp_path, check_usable=True)
    assert counted[0] == 0
    assert rows.reads > 0


def test_a_check_that_could_not_tell_or_was_not_planned_is_refused(tmp_path: Path) -> None:
    private = PrivateData(Rows(0), example=EXAMPLE)
    with pytest.raises(ConfigError, match="spare_steps=1"):
        trainer(plan(spare_steps=0)).fit(private, run_dir=tmp_path / "a", check_usable=True)
    for noise, needed in ((100.0, 816), (5.0, 59)):
        small = plan(noise_multiplier=noise, expected_batch_size=needed - 2)
        with pytest.raises(ConfigError, match=f"expected_batch_size={needed - 2} above {needed}.*inspect_not_private"):
            trainer(small).fit(private, run_dir=tmp_path / f"b{needed}", check_usable=True)
        spread = 16 + math.hypot(16, 8 * noise)  # at sampling rate 0.5
        assert round(spread) == needed
        error = 4 * math.sqrt(noise**2 + spread * 0.5) / spread
        assert error == pytest.approx(0.5)
    assert not any(
        hs.Ledger.open(path).runs[run].spent
        for path in tmp_path.glob("*/ledger.jsonl")
        for run in hs.Ledger.open(path).runs
    )


CORRELATED = hs.PrivacyPlan.calibrate(
    epsilon=8, delta=1e-4, population=600, batch_size=300, epochs=2, noise=hs.Correlated(buffers=1), spare_steps=1
)


@pytest.mark.parametrize("broken", [0, 600])
def test_it_is_on_where_a_step_is_spare_and_the_count_can_tell(tmp_path: Path, broken: int) -> None:
    private = PrivateData(Rows(broken), example=EXAMPLE)
    if broken:
        with pytest.raises(PrivateDataError, match=r"about \d% can be used"):
            trainer(plan()).fit(private, run_dir=tmp_path)
    else:
        result = trainer(plan()).fit(private, run_dir=tmp_path)
        assert result.history[0]["usable_share"] > 0.5
    (run,) = hs.Ledger.open(tmp_path / "ledger.jsonl").runs.values()
    assert run.spent == (1 if broken else 6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (plan(spare_steps=0), "Keep one in hand: PrivacyPlan.calibrate(spare_steps=1)"),
        (plan(noise_multiplier=100.0), "expected_batch_size=300 above 816"),
        (CORRELATED, ""),
    ],
    ids=["spare", "noise", "correlated"],
)
def test_else_one_line_says_how_to_get_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: hs.PrivacyPlan, said: str
) -> None:
    """And none where there is no way to. With False there is neither a count nor a line."""
    for number, check in enumerate((None, False)):
        caplog.clear()
        private = PrivateData(Rows(600), example=EXAMPLE)
        result = trainer(given).fit(private, run_dir=tmp_path / str(number), check_usable=check)
        assert result.stopped == "finished"
        assert not any("usable_share" in line for line in result.history)
        lines = [record.message for record in caplog.records if "no private record can be used" in record.message]
        assert len(lines) == bool(said and check is None)
        assert all(said in line for line in lines)


def test_of_tensors_whose_form_was_compared_it_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="halfsilver"):
        trainer(plan(spare_steps=0)).fit((Rows(0).x, torch.zeros(600, dtype=torch.int64)), run_dir=tmp_path)
    (line,) = [record for record in caplog.records if "no private record can be used" in record.message]
    assert line.levelname == "INFO"


def test_without_a_check_nothing_is_counted_though_a_step_is_spare(tmp_path: Path) -> None:
    trainer(plan()).fit(PrivateData(Rows(600), example=EXAMPLE), run_dir=tmp_path, check_usable=False)
    (run,) = hs.Ledger.open(tmp_path / "ledger.jsonl").runs.values()
    assert run.spent == 5


def test_a_run_that_diverges_stops_and_says_so(tmp_path: Path) -> None:
    """Its files are valid JSON, and nothing shows the last finite figure as the outcome."""
    test = torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)
    private = (Rows(0).x, torch.zeros(600, dtype=torch.int64))
    loud = plan(steps=50, noise_multiplier=500.0)
    result = trainer(loud, lr=1e38).fit(private, run_dir=tmp_path, test=test, test_every=1)
    assert result.stopped == "diverged"
    assert result.updates < 10
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert math.isnan(result.history[-1]["loss"])
    assert any("diverged" in remark for remark in result.statement["remarks"])
    assert verify(tmp_path)["ok"]
    assert "diverged" in write_report(tmp_path).read_text()
    again = trainer(loud, lr=1e38).fit(private, run_dir=tmp_path, test=test, test_every=1)
    assert (again.stopped, again.updates) == ("diverged", result.updates)
