"""`hs.audit`: attack a trainer's own mechanism with canaries, and compare the result with the claimed epsilon."""

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
    """The result of an audit: a lower bound on epsilon, and every test with its outcome.

    Args:
        observation: What was observed of the audited run.
        findings: One entry per test. Together, a correct loop raises any alarm with probability at most `alpha`.
        claimed: The epsilon of the audited steps at `delta`, by the accountant. It is not that of the whole plan.
        lower_bound: What the attack shows: epsilon is at least this, with probability `confidence`.
        confidence: The probability with which `lower_bound` holds, in (0, 1).
        delta: The delta of both epsilons, in (0, 1).
        alpha: The probability of a false alarm over all findings, in (0, 1).
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
        """The share of the claimed epsilon that the attack reaches: lower_bound / claimed."""
        return self.lower_bound / self.claimed

    @property
    def alarms(self) -> list[Finding]:
        """The findings that contradict the plan. A correct loop has none, except with probability `alpha`."""
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
        """Everything but the scores, as values that JSON can hold.

        Returns:
            Bounds, plan, numbers of canaries, findings, and what the audit does not prove.
        """
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
        """Draw the scores of canaries that were read, and of numbers that no record belongs to, as two histograms.

        Args:
            path: The file, which ends in ``.png`` or ``.svg``.

        Returns:
            The path.

        Raises:
            ConfigError: If the file has another ending.
            MissingExtra: If matplotlib is not installed.
        """
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
    """Attack a copy of your trainer with canaries, and compare what they reveal with the claimed epsilon.

    The copy has the trainer's model, loss, plan, mirror map and speed options, plain SGD as its optimizer, and a bank
    of canaries beside the model. It trains on `rows` and the canaries through `Trainer.fit`. The trainer itself is not
    changed. An audit reads everything in the clear and spends nothing of any ledger.

    Four instruments test the run. A turns the error rates of an attacker into a lower bound on epsilon. B tests sampler
    and noise against the plan. C runs the same random numbers on neighbouring data and measures how far one record
    reaches. Reconciliation compares the ledger with the updates of the model. An alarm shows a
    bug, except with probability `alpha`. The absence of alarms is not a proof: see ``not_proved`` in
    `AuditReport.to_dict`.

    Args:
        trainer: The trainer to attack.
        rows: Public or made-up rows to train on, of the kind that the trainer takes as private data.
        public: What the trainer's mirror map learns from. Default None.
        canaries: How many canary records to add, even and at least 2. Default 1000. More canaries and more steps give a
            tighter bound and take longer.
        steps: How many steps of the plan to run, at least 1. Default 100. At most those of the plan are run.
        delta: The delta of both epsilons, in (0, 1). Default 1e-5.
        confidence: The probability with which the lower bound holds, in (0, 1). Default 0.95.
        alpha: The probability of any false alarm, in (0, 1). Default 1e-4.
        layer: The kind of layer that the bank is made of: "linear" (the default), "embedding" or "conv". Choose the
            kind whose gradient code you want to attack.
        local: How users train, where the plan's unit is a user; each user has one row then. Default None, for plans
            whose unit is an example.
        replay: Whether to run instrument C too. Default True. Set it to False to save time.
        run_dir: A new folder for the files of the audited run. Default None, which keeps none.

    Returns:
        The report.

    Raises:
        ConfigError: If `rows` are private data, or if an option is out of range.

    Example:
        >>> import torch
        >>> import halfsilver as hs
        >>> x, y = torch.randn(200, 3), torch.randn(200)
        >>> model = torch.nn.Linear(3, 1)
        >>> loss_fn = lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]).square()
        >>> plan = hs.PrivacyPlan(steps=10, sampling_rate=0.5, expected_batch_size=100, noise_multiplier=1.0)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = hs.Trainer(model, loss_fn, optimizer=sgd, plan=plan)
        >>> hs.audit(trainer, (x, y), canaries=20, steps=5, replay=False).alarms
        []

    References:
        - Jagielski, Ullman and Oprea 2020, Auditing Differentially Private Machine Learning: How Private is Private
          SGD?, arXiv:2006.07709, for lower bounds from the error rates of an attack.
        - Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning, arXiv:2302.07956, for an attacker
          who sees every step, and for bounds by way of Gaussian DP.
        - Steinke, Nasr and Jagielski 2023, Privacy Auditing with One (1) Training Run, arXiv:2305.08846, for many
          canaries in one run.
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
