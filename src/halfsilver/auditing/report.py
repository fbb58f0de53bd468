"""`hs.audit`: attack a trainer's own mechanism with canaries, and hold the result against the printed epsilon."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halfsilver._core.local_training import LocalTraining
from halfsilver.auditing.bank import LayerKind, Layout
from halfsilver.auditing.instruments import Finding, canaries, judge, lower_bound
from halfsilver.auditing.observe import Kind, Observation
from halfsilver.auditing.run import Audited, Private, all_rows, observe
from halfsilver.errors import ConfigError, require
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.users import InProcess, PrivateUsers
from halfsilver.trainer import Trainer

ALPHA = 1e-4

NOT_PROVED = (
    "A lower bound below the claimed epsilon refutes nothing and certifies nothing: the guarantee is the proof, and "
    "this is a test of the code against it.",
    "Instrument A takes the plan's rate, the number of steps and the normal law for granted; instrument B tests these "
    "on this run, and misses what deviates by less than chance does.",
    "Canaries are the worst records of this mechanism. What could be learnt about a real record is at most as much, "
    "and mostly far less.",
    "Other leaks are not looked at: running times, memory, metrics of private rows, choices made by looking at private "
    "rows, and whatever is published beside the model.",
    "The audited run has rows and canaries of its own, plain SGD, and a bank beside the model. It says nothing about a "
    "run that other code, another machine or another version has made.",
)


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What an audit found. `claimed` is the epsilon of the audited steps at `delta`, not that of the whole plan.

    `lower_bound` holds with `confidence`. The findings share a false-alarm probability of `alpha`.
    """

    observation: Observation
    findings: Sequence[Finding]
    claimed: float
    lower_bound: float
    confidence: float
    delta: float
    alpha: float

    @property
    def tightness(self) -> float:
        """The share of the claimed epsilon that the attack reaches."""
        return self.lower_bound / self.claimed

    @property
    def alarms(self) -> list[Finding]:
        return [f for f in self.findings if f.alarm]

    @property
    def not_proved(self) -> tuple[str, ...]:
        """What no alarm does not mean: `NOT_PROVED`, and what is special about this run's map."""
        why = self.observation.unread
        if not why:
            return NOT_PROVED
        own = (
            f"Released values could not be computed from the updates, because {why}. They were noted where the map "
            "is given them, so what reaches the model past them was not audited; that each direction comes out the "
            "same when computed again was."
        )
        return (*NOT_PROVED, own)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the scores, for JSON."""
        seen = self.observation
        names = ("claimed", "lower_bound", "confidence", "tightness", "delta", "alpha")
        return {
            "loop": seen.loop,
            **{name: getattr(self, name) for name in names},
            "plan": seen.plan.to_dict(),
            "canaries": {kind.name.lower(): int((seen.kinds == kind).sum()) for kind in Kind},
            "findings": [asdict(f) for f in self.findings],
            "alarms": len(self.alarms),
            "not_proved": list(self.not_proved),
        }

    def figure(self, path: str | Path) -> Path:
        """The scores of canaries that were read and of those that are not there, as PNG or SVG by the name's ending."""
        from halfsilver.report.plots import COLOURS, new_axes, saved, style

        path = Path(path)
        require(path.suffix in (".png", ".svg"), "figure", path.name, "to end in .png or .svg")
        inside, outside = canaries(self.observation)
        edges = np.histogram_bin_edges(np.concatenate([inside, outside]), 80)
        with style():
            figure, axes = new_axes()
            for scores, label, colour in ((outside, "not in the data", "public"), (inside, "in the batch", "pda")):
                axes.hist(scores, edges, density=True, alpha=0.6, color=COLOURS[colour], label=label)
            axes.axvline(0.5, color="black", linestyle=":", linewidth=1, label="the attacker's threshold")
            axes.set(xlabel="score of a canary in one step, in clip norms", ylabel="density")
            axes.legend(frameon=False)
            return saved(figure, path)


def audit(
    trainer: Trainer,
    rows: Any,
    public: Any = None,
    *,
    canaries: int = 1000,
    steps: int = 100,
    delta: float = 1e-5,
    confidence: float = 0.95,
    alpha: float = ALPHA,
    layer: LayerKind = "linear",
    local: LocalTraining | None = None,
    replay: bool = True,
    run_dir: str | Path | None = None,
) -> AuditReport:
    """Train a copy of the trainer's model on `rows` and canaries for some `steps` of its plan, and attack it.

    `rows` must be public or made up: an audit reads everything in the clear and spends nothing. `public` is what the
    trainer's mirror map learns from. The copy has the trainer's loss, plan, map and speed options, plain SGD for an
    optimizer, and a bank of `layer` beside it; the trainer itself is left alone. `local` says how users train
    themselves where the plan's unit is a user; each has one row then. With `replay`, short runs on neighbouring data
    follow. The files go to `run_dir`, which must be new, or to nowhere.
    """
    if isinstance(rows, PrivateData | PrivateUsers):
        raise ConfigError("An audit reads its rows in the clear. Give it public or made-up rows, not private ones.")
    require(0 < confidence < 1, "confidence", confidence, "in (0, 1)")
    plan = replace(trainer.plan, steps=min(steps, trainer.plan.steps), spare_steps=0)
    audited = Audited(
        trainer=trainer,
        rows=all_rows(rows),
        public=None if public is None else all_rows(public),
        private=_private(plan.unit, local),
        name=type(trainer.model).__name__,
    )
    layout = Layout(canaries=canaries, layer=layer if local is None else "embedding")
    with tempfile.TemporaryDirectory() as nowhere:
        seen = observe(audited, plan, Path(run_dir or nowhere), layout, replay=replay)
    return reported(seen, delta=delta, confidence=confidence, alpha=alpha)


def reported(seen: Observation, *, delta: float, confidence: float, alpha: float = ALPHA) -> AuditReport:
    """The verdict of all instruments on one observation."""
    return AuditReport(
        observation=seen,
        findings=judge(seen, alpha, delta=delta),
        claimed=seen.plan.epsilon(delta),
        lower_bound=lower_bound(seen, 1 - confidence, delta),
        confidence=confidence,
        delta=delta,
        alpha=alpha,
    )


def _private(unit: str, local: LocalTraining | None) -> Private:
    require((unit == "user") == (local is not None), "local", local, f"to go with plan.unit={unit!r}")
    if local is None:
        return PrivateData.of
    return lambda records: InProcess(PrivateUsers(records), local)
