"""`select`: train a random number of runs with settings drawn at random, and publish the best one alone.

The price is that of one draw of the runs, whatever their number: see `Selection`. It rests on nobody learning that
number or anything of the other runs, so all of them happen in a sealed folder that is deleted before the best model is
published.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import math
import os
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from halfsilver._core import checkpoint, system
from halfsilver._core.distributed import World
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import eval_mode, norm, trainable
from halfsilver._core.warning_filters import warning_filter, warning_filters
from halfsilver.errors import BudgetExceeded, CheckpointCorrupt, ConfigError, SelectionFailed, SelectionLost, require
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import OsEntropy
from halfsilver.privacy.ledger import Head, Ledger
from halfsilver.privacy.selection import Selection
from halfsilver.privacy.users import Engine
from halfsilver.runs.folder import PROBE, read_json, write_json
from halfsilver.runs.session import Session
from halfsilver.runs.signals import TERMINATED
from halfsilver.runs.state import Parts
from halfsilver.runs.statement import diverged, stamps
from halfsilver.trainer import Trainer

__all__ = ["Selected", "Selection", "select"]

S = TypeVar("S")
Build = Callable[[S], Trainer]
Score = Callable[[nn.Module], Any]
Draw = tuple[int, int]  # the number of a setting, and a seed for what `build` draws

_SEED_BYTES = 7
_STOPS = (KeyboardInterrupt, OSError, MemoryError, torch.OutOfMemoryError, BudgetExceeded)  # of a person or the machine


@dataclass(frozen=True, kw_only=True)
class Selected(Generic[S]):
    """The best run of a selection. Nothing in it tells how many runs there were.

    Args:
        model: The trained model.
        setting: The one that it was trained with.
        score: Its score; NaN if it has none.
        plan: What was paid for.
        run_dir: The run folder, which `halfsilver report` and `halfsilver verify` take.
        statement: The privacy statement, as in statement.json.
    """

    model: nn.Module
    setting: S
    score: float
    plan: Selection
    run_dir: Path
    statement: Mapping[str, Any]

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon of the whole selection, by RDP: the number to publish.

        Args:
            delta: In (0, 1) (default: the delta of the statement).
        """
        return self.plan.epsilon(float(self.statement["delta"]) if delta is None else delta)


def select(
    settings: Sequence[S],
    build: Build[S],
    score: Score,
    private: Any,
    public: Any = None,
    *,
    plan: Selection,
    run_dir: str | Path,
    ledger: Ledger | str | Path | None = None,
    pay_again: bool = False,
) -> Selected[S]:
    """Train a random number of runs, each with a setting drawn uniformly, and return the one with the best score.

    The number of runs K is drawn once, after the ledger has the whole cost on disk and before the first run. Runs,
    their ledgers, K and the settings drawn are in ``run_dir/sealed``, which only the owner can read. That folder is
    deleted before the best model is written to `run_dir`. If the process is killed, call `select` again in the same
    way: it reads K again, and resumes the run that was killed as `Trainer.fit` would.

    Nothing is printed, logged or warned of while the runs train. Before anything is spent, `build` and `score` are
    called for each setting, so that most mistakes show up there. A stopped selection is resumed with the same two only,
    recognised by what they gave then: another score would be another answer. A run whose score raises has the worst
    score, and one whose training raises is worse still; ``run_dir/sealed/error.txt`` says why.

    Guarantee: the model, the score, the setting and all files that remain are (epsilon, delta)-DP with the figures of
    ``plan.epsilon()``, if `score` reads public rows only and if each run depends on its setting and on the data alone.
    The time that a selection takes is not protected, nor is anything from those who can watch the process or read the
    sealed folder: they see K. Neither are creation times of files and traces of deleted files on the disk.

    Args:
        settings: What to choose from: numbers, texts, tuples, dicts or dataclasses. A setting may be drawn several
            times or not at all. They must be fixed without looking at private rows.
        build: ``build(setting)`` returns a new `Trainer` with a new model, and with ``plan.each`` as its plan, of which
            it may change `max_grad_norm`. It must have no callbacks, which would see every run. Train a public start
            once, outside of `build`.
        score: ``score(model)`` returns a number, computed on public rows alone. Higher is better; what is not finite is
            worst. The same model must have the same score again. It is in eval mode, and no gradients are recorded.
        private: The private data, as `Trainer.fit` takes them.
        public: The public data, as `Trainer.fit` takes them.
        plan: The plan of one run, and how many runs to expect. See `Selection.calibrate`.
        run_dir: The run folder. A finished selection in it is only loaded.
        ledger: The ledger of the private data set, where several runs share one (default: in the run folder).
        pay_again: If the sealed folder is gone although the selection was paid for, or if `build` or `score` have
            changed, pay for a second one and draw again. Default False: the selection is refused.

    Returns:
        The best model with its setting and score.

    Raises:
        ConfigError: An argument is wrong. Nothing has been spent.
        BudgetExceeded: The ledger's budget does not allow the selection. Nothing has been spent.
        SelectionLost: It was paid for, but K is gone, a run has no steps left after kills, or training fails in all.
        SelectionFailed: The first run failed before it read a private record, or disk or memory did. It can be resumed.

    References:
        - Papernot and Steinke 2022, Hyperparameter Tuning with Renyi Differential Privacy, arXiv:2110.03620.
        - Liu and Talwar 2019, Private Selection from Private Candidates, arXiv:1811.07971.

    Example:
        >>> import tempfile, torch, halfsilver as hs
        >>> from halfsilver.selection import Selection
        >>> x = torch.randn(500, 3)
        >>> y = x.sum(1)
        >>> def loss_fn(model, batch):
        ...     return (model(batch[0])[:, 0] - batch[1]) ** 2
        >>> plan = Selection.calibrate(epsilon=4, delta=1e-4, trials=3, population=400, batch_size=40, steps=5)
        >>> def build(lr):
        ...     model = torch.nn.Linear(3, 1)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=lr)
        ...     return hs.Trainer(model, loss_fn, optimizer=sgd, plan=plan.each)
        >>> def score(model):
        ...     return -loss_fn(model, (x[400:], y[400:])).mean()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     best = hs.select([0.01, 0.1], build, score, (x[:400], y[:400]), plan=plan, run_dir=folder)
        >>> best.setting in (0.01, 0.1), best.epsilon() <= 4
        (True, True)
    """
    require(isinstance(plan, Selection), "plan", plan, "to be a Selection", "Use Selection(each=plan, trials=10).")
    if World.current(torch.device("cpu")).size > 1:
        raise ConfigError("select runs in one process. Call it before torch.distributed starts.")
    private = private if isinstance(private, PrivateData | Engine) else PrivateData(private)
    names = _names(settings)
    device, probe = _check(settings, build, score, plan)
    options = {"selection": {"settings": names, "public": public is not None}, PROBE: probe}
    if pay_again:
        with Session.open(run_dir, ledger, plan, config=options, delta=None) as session:
            _abandon_if_lost(session, probe)
    with Session.open(run_dir, ledger, plan, config=options, delta=None) as session:
        seal = _Seal.of(session)
        if not session.folder.checkpoint.exists():
            draws = None if seal.winner.exists() else _draws(session, seal, plan, len(settings), probe)
            if draws is not None:
                fit = _Run(settings, build, score, private, public, plan, device, seal)
                _train_all(session, seal, draws, fit)
            seal.publish(session.folder.checkpoint)
        return _finished(session, seal, settings, build, plan, device)


# ---- before anything is spent


def _names(settings: Sequence[S]) -> list[str]:
    require(len(settings) >= 1, "number of settings", len(settings), "at least 1")
    names = [repr(setting) for setting in settings]
    for name in names:  # by which a resumed selection recognises its settings
        require(" at 0x" not in name, "settings", name, "to have a repr that shows their values", "Use a dataclass.")
    return names


def _check(settings: Sequence[S], build: Build[S], score: Score, plan: Selection) -> tuple[torch.device, str]:
    """Whether `build` and `score` can be used; returns the device of the models, and a digest of what the two give.

    A model that two runs share would carry what one has learnt to the next, and they would not be independent.
    """
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    before: Trainer | None = None
    found = list[str]()
    for number, setting in enumerate((settings[0], *settings)):  # the first one twice, with one seed
        with own_randomness(max(0, number - 1), devices):
            trainer = build(setting)
            _check_trainer(trainer, plan)
            if before is not None and _memory(before) & _memory(trainer):
                raise ConfigError(
                    "Expected build(setting) to make a new model each time: two of its models share weights."
                )
            outputs = [*(norm([p.detach()]) for p in trainer.model.parameters()), _rank(_scored(score, trainer.model))]
            found.append(" ".join(f"{value:.2e}" for value in outputs))  # machines differ in later digits
            before = trainer
    assert before is not None
    hint = "Draw random numbers from the generators of torch, NumPy or Python: a resumed selection compares them."
    require(found[0] == found[1], "outputs of build and score", found[1], f"to be {found[0]} again", hint)
    return trainable(before.model)[0].device, hashlib.sha256("".join(found).encode()).hexdigest()


def _check_trainer(trainer: Trainer, plan: Selection) -> None:
    require(isinstance(trainer, Trainer), "build(setting)", trainer, "to be a Trainer")
    same = replace(trainer.plan, max_grad_norm=plan.each.max_grad_norm) == plan.each
    require(same, "plan of build(setting)", trainer.plan, f"to be plan.each, {plan.each}")
    require(
        not trainer.callbacks, "callbacks", trainer.callbacks, "to be empty: they would see each run of a selection"
    )
    broken = stamps(trainer._config())
    require(not broken, "trainer", broken, "to keep its guarantee in a selection")
    require(not trainer._fitted, "build(setting)", trainer, "to be a Trainer that has not been fitted")


def _memory(trainer: Trainer) -> set[int]:
    return {p.data_ptr() for p in trainable(trainer.model)}


def _scored(score: Score, model: nn.Module) -> float | None:
    """The score, as JSON has it: None if it is not finite."""
    with torch.no_grad(), eval_mode(model):
        value = score(model)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"Expected score(model) to return one number, not {type(value).__name__}.") from None
    return number if math.isfinite(number) else None


# ---- the sealed folder


@dataclass(frozen=True)
class _Seal:
    """Everything that tells of K or of runs that are not the best. It begins to exist before K is drawn."""

    path: Path
    run_id: str

    @classmethod
    def of(cls, session: Session) -> _Seal:
        return cls(session.folder.path.resolve() / "sealed", session.run_id)

    @property
    def draw(self) -> Path:
        return self.path / "draw.json"

    @property
    def best(self) -> Path:
        """The best run so far, and how many are done: in one file, so that the two cannot disagree."""
        return self.path / "best.safetensors"

    @property
    def winner(self) -> Path:
        """The checkpoint to be published. Where it is, the runs are over."""
        return self.path / "winner.safetensors"

    @property
    def error(self) -> Path:
        return self.path / "error.txt"

    def run(self, index: int) -> Path:
        return self.path / f"run-{index}"

    def note(self, error: BaseException) -> None:
        """Keep the latest error for the owner of the folder, if it can be written."""
        with contextlib.suppress(OSError):
            self.error.write_text("".join(traceback.format_exception(error)), encoding="utf-8")

    def make(self) -> None:
        """Make it, empty."""
        self.destroy()
        self.path.mkdir(mode=0o700)
        system.fsync_folder(self.path.parent)

    def read(self) -> list[Draw] | None:
        """What was drawn; None if it is not there, damaged, or that of another selection."""
        try:
            found = read_json(self.draw)
            if found["run_id"] != self.run_id:
                return None
            return [(int(setting), int(seed)) for setting, seed in found["draws"]]
        except (CheckpointCorrupt, KeyError, TypeError, ValueError):
            return None

    def publish(self, target: Path) -> None:
        """Delete all but the winner, durably, and only then put that in its place. May be called again after a kill."""
        with system.confirmed(self.path):
            for entry in self.path.iterdir():
                if entry != self.winner:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            system.fsync_folder(self.path)
            os.replace(self.winner, target)
        system.fsync_folder(target.parent)

    def destroy(self) -> None:
        if self.path.exists():
            with system.confirmed(self.path):
                shutil.rmtree(self.path)
            system.fsync_folder(self.path.parent)


def _draws(session: Session, seal: _Seal, plan: Selection, settings: int, probe: str) -> list[Draw]:
    """K settings and seeds: those that were drawn before or, for a new selection, new ones after it is paid for."""
    ledger = session.ledger
    assert ledger is not None, "select runs in one process"
    if _is_another(session, probe):
        raise ConfigError(f"Expected build and score to be those of {session.folder.path}: {_ONE_SCORE} {_PAY_AGAIN}")
    if _is_paid(session):
        draws = seal.read()
        if draws is None:
            raise SelectionLost(f"{session.folder.path}: the selection was paid for, but K is gone. {_PAY_AGAIN}")
        return draws
    seal.make()
    ledger.intend(session.run_id, owner=session.owner)  # from here on it is paid for, whatever happens
    entropy = OsEntropy()
    runs = range(plan.draw(entropy))
    draws = [(plan.draw_setting(settings, entropy), _seed()) for _ in runs]
    write_json(seal.draw, {"run_id": session.run_id, "draws": draws})
    return draws


_ONE_SCORE = "a selection is paid for one score."
_PAY_AGAIN = "A second draw costs as much again: select(..., pay_again=True) records that in the ledger and draws."


def _seed() -> int:
    return int.from_bytes(os.urandom(_SEED_BYTES), "big")


def _is_paid(session: Session) -> bool:
    """Whether the ledger counts it. This enters it into the ledger, which also settles a record that was cut off."""
    assert session.ledger is not None, "select runs in one process"
    return session.ledger.register_run(session.run_id, session.plan, whole=True).spent > 0


def _is_another(session: Session, probe: str) -> bool:
    """Whether it began with another `build` or `score`, as far as it is noted: versions before did not."""
    return bool(read_json(session.folder.config).get(PROBE, probe) != probe)


def _abandon_if_lost(session: Session, probe: str) -> None:
    """Close a selection that cannot be resumed, and make room for another. What it cost stays in the ledger."""
    seal = _Seal.of(session)
    if session.folder.checkpoint.exists() or seal.winner.exists():
        return
    if (not _is_paid(session) or seal.read() is not None) and not _is_another(session, probe):
        return
    assert session.ledger is not None, "select runs in one process"
    session.ledger.finish(session.run_id, 0)
    seal.destroy()
    session.folder.clear()


# ---- the runs


@dataclass(frozen=True)
class _Run(Generic[S]):
    """One run of the selection, from a draw to the weights and their score."""

    settings: Sequence[S]
    build: Build[S]
    score: Score
    private: PrivateData | Engine
    public: Any
    plan: Selection
    device: torch.device
    seal: _Seal

    def __call__(self, index: int, draw: Draw) -> tuple[dict[str, Tensor], float | None, str]:
        """Weights, score, and why there are no weights.

        Once a run has read private rows, its errors may follow from them, and whether a later run is there must not be
        heard. So an error is the result of the run, and the worst one.
        """
        setting, seed = draw
        folder = self.seal.run(index)
        with own_randomness(seed, [self.device]):
            try:
                trainer = self.build(self.settings[setting])
                _check_trainer(trainer, self.plan)
                trainer.progress = False
                result = trainer.fit(self.private, self.public, run_dir=folder, check_usable=False)
            except BaseException as error:
                if isinstance(error, _STOPS) or getattr(error, "code", None) == TERMINATED:
                    raise
                if not index and not _has_begun(folder / "ledger.jsonl"):
                    shutil.rmtree(folder, ignore_errors=True)  # a mistake; the run begins again once it is corrected
                    raise
                self.seal.note(error)
                return {}, None, "".join(traceback.format_exception_only(error)).strip()
            if result.stopped == "budget":
                raise BudgetExceeded("A run has no steps left after kills. Keep some: calibrate(spare_steps=...).")
            _check_ledger(folder / "ledger.jsonl", self.plan)
            weights = {f"model.{name}": t.detach().cpu().clone() for name, t in trainer.model.state_dict().items()}
            try:
                return weights, _scored(self.score, trainer.model), ""
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self.seal.note(error)
                return weights, None, ""


def _has_begun(path: Path) -> bool:
    return path.exists() and any(run.spent for run in Ledger.open(path, create=False).runs.values())


def _check_ledger(path: Path, plan: Selection) -> None:
    """Whether what the run did to the private data is what one run of the selection may do."""
    runs = [*Ledger.open(path, create=False).runs.values()]
    done = len(runs) == 1 and runs[0].closed is not None and runs[0].spent <= plan.each.max_releases
    if not done or runs[0].plan.count() != plan.each.count():
        raise ConfigError(f"Expected the ledger of a run to hold that run alone, finished, under plan.each: {runs}.")


def _train_all(session: Session, seal: _Seal, draws: Sequence[Draw], run: _Run[Any]) -> None:
    """Train what is missing, and leave the winner in the seal. What goes wrong does not tell where."""
    lost = None
    try:
        with _hushed():
            _continue(session, seal, draws, run)
            return
    except Exception as error:
        seal.note(error)
        lost = str(error) if isinstance(error, BudgetExceeded | SelectionLost) else None
    # Raised here, and not where the error was caught, so that it does not carry that one along.
    if lost is not None:
        seal.destroy()
        raise SelectionLost(f"{session.folder.path}: the selection cannot be finished. {lost} {_PAY_AGAIN}")
    raise SelectionFailed(
        f"The selection in {session.folder.path} was stopped. If it can be written, {seal.error} says why; it also "
        "tells which run it was, so treat it as private. Remove the cause and call select again: it resumes."
    )


def _continue(session: Session, seal: _Seal, draws: Sequence[Draw], run: _Run[Any]) -> None:
    weights, about = checkpoint.read(seal.best) if seal.best.exists() else ({}, {"done": 0})
    for index in range(about["done"], len(draws)):
        setting, seed = draws[index]
        found, score, failed = run(index, draws[index])
        why = about.get("why", failed)  # of the first run: if all fail, that is the one to be told of
        if found and (not weights or _rank(score) > _rank(about["score"])):
            weights, about = found, {"score": score, "setting": setting, "seed": f"{seed:0{2 * _SEED_BYTES}x}"}
        about = {**about, "done": index + 1, "why": why}
        checkpoint.write(seal.best, weights, about)
        with contextlib.suppress(FileNotFoundError):  # a run that could not be built has no folder
            shutil.rmtree(seal.run(index))
    if not weights:
        raise SelectionLost(f"All runs failed in training, the first one with {about['why']}.")
    head = _head(session)
    told = {name: about[name] for name in ("score", "setting", "seed")}
    own = {"run_id": session.run_id, "plan_hash": session.plan.fingerprint(), "ledger_head": head, "step": 1}
    checkpoint.write(seal.winner, weights, {**own, **told})


def _rank(score: float | None) -> float:
    return -math.inf if score is None else score


def _head(session: Session) -> Head | None:
    assert session.ledger is not None, "select runs in one process"
    return session.ledger.runs[session.run_id].last


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """No line, log record or warning: their number would tell how many runs there are."""
    disabled, always = logging.root.manager.disable, torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else a warning that torch gives once would be used up here
    logging.disable(logging.CRITICAL)
    try:
        with (
            warning_filters(warning_filter("ignore")),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        logging.disable(disabled)
        torch.set_warn_always(always)


# ---- the result


def _finished(
    session: Session, seal: _Seal, settings: Sequence[S], build: Build[S], plan: Selection, device: torch.device
) -> Selected[S]:
    """Finish the record, and load the model. All of it may be done again after a kill."""
    seal.destroy()
    parts = session.load()
    assert parts is not None, "the checkpoint is there"
    weights, about = parts
    score = math.nan if about["score"] is None else float(about["score"])
    if not session.history():
        session.log({"step": 1, "score": score})
    if not session.finished:
        session.finish(1)  # last, as the ledger keeps digests of the files
    whole = all(bool(t.isfinite().all()) for t in weights.values())
    statement = session.write_statement([] if whole else [diverged(1, plan)])
    for file in session.folder.path.iterdir():
        os.utime(file)  # the time between two files would tell how long it took
    return Selected(
        model=_loaded(parts, settings, build, device),
        setting=settings[about["setting"]],
        score=score,
        plan=plan,
        run_dir=session.folder.path,
        statement=statement,
    )


def _loaded(parts: Parts, settings: Sequence[S], build: Build[S], device: torch.device) -> nn.Module:
    weights, about = parts
    with own_randomness(int(about["seed"], 16), [device]):
        model = build(settings[about["setting"]]).model
    try:
        model.load_state_dict(checkpoint.under("model.", weights))
    except RuntimeError as error:
        raise CheckpointCorrupt(f"The checkpoint does not fit the model of build(setting): {error}") from error
    return model
