"""Typed errors. Each message says what was wrong, with name, value and range, and what to do."""

from __future__ import annotations

import numbers


class HalfsilverError(Exception):
    """Base class of every error that halfsilver raises on purpose. Catch it to handle all of them.

    Example:
        >>> import halfsilver as hs
        >>> try:
        ...     hs.Budget(epsilon=-1, delta=1e-5)
        ... except hs.HalfsilverError as error:
        ...     print(error)
        Expected epsilon=-1 in (0, inf).
    """


class ConfigError(HalfsilverError, ValueError):
    """An option has a value that cannot be used. The message names the option, its value and its range."""


class BudgetExceeded(HalfsilverError):
    """The next private step would exceed the budget of the data set or the steps of the plan.

    It is raised before private data are touched, and nothing is spent. `Trainer.fit` raises it for a new run whose plan
    does not fit. A refusal after the first step ends the run, and its result says so.

    Example:
        >>> import tempfile
        >>> import halfsilver as hs
        >>> ledger = hs.Ledger.open(tempfile.mkdtemp() + "/ledger.jsonl", budget=hs.Budget(epsilon=0.01, delta=1e-5))
        >>> plan = hs.PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=50, noise_multiplier=1.0)
        >>> run = ledger.register_run("first", plan)
        >>> ledger.intend("first")
        Traceback (most recent call last):
        ...
        halfsilver.errors.BudgetExceeded: ... The private data was not touched; the run stops here.
    """


class LedgerCorrupt(HalfsilverError):
    """A privacy ledger is not the file that its own hash chain, its head file or a checkpoint says it is.

    Restore the newest copy. Do not continue with an older one, because it does not count all steps.

    Example:
        >>> import pathlib, tempfile
        >>> import halfsilver as hs
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "ledger.jsonl"
        >>> size = path.write_text("something else")
        >>> hs.Ledger.open(path)
        Traceback (most recent call last):
        ...
        halfsilver.errors.LedgerCorrupt: ...
    """


class CheckpointCorrupt(HalfsilverError):
    """A checkpoint or result file cannot be read, or belongs to another plan, model or ledger."""


class RunFolderBusy(HalfsilverError):
    """Another process is writing to this run folder or ledger, or has taken the run over."""


class StorageError(HalfsilverError, OSError):
    """The operating system refused to write or to sync a file. Nothing that was not confirmed was acted upon."""


class UnsupportedLayer(HalfsilverError):
    """A module cannot be trained with a guarantee per example, or not by the chosen backend.

    The message says what to change, often the layer or the backend.

    Example:
        >>> import torch
        >>> import halfsilver as hs
        >>> from halfsilver.privacy.gradients import make_backend
        >>> model = torch.nn.Embedding(3, 2, max_norm=1.0)
        >>> loss_fn = lambda model, batch: model(batch).sum((1, 2))
        >>> rows = torch.zeros(4, 1, dtype=torch.int64)
        >>> make_backend(hs.Performance(backend="book"), model, loss_fn, rows).clipped_sum(rows, 1.0)
        Traceback (most recent call last):
        ...
        halfsilver.errors.UnsupportedLayer: ... Drop the option.
    """


class SelectionLost(HalfsilverError):
    """A selection was paid for and cannot be finished. `halfsilver.select` draws again only if it is paid for again."""


class SelectionFailed(HalfsilverError):
    """A selection was stopped. The message names the file with the cause, and does not tell which run it was."""


class PrivateDataError(HalfsilverError):
    """Private data were given, or requested, in a way that would break the guarantee."""


class ConvergenceError(HalfsilverError):
    """A solver on the public loss did not reach its tolerance."""


class DataMissing(HalfsilverError):
    """A file of a standard data set is missing or incomplete."""


class MissingExtra(HalfsilverError, ImportError):
    """An optional dependency is not installed.

    Args:
        package: The package that is missing.
        extra: The extra of halfsilver that installs it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed. Install it with: pip install 'halfsilver[{extra}]'")


class PlatformUnsupported(HalfsilverError):
    """The operating system lacks a feature that the ledger's guarantee needs."""


def require(condition: bool, name: str, value: object, expected: str, hint: str = "") -> None:
    """Raise `ConfigError` with name, value and range unless a condition holds.

    Args:
        condition: Whether the value can be used.
        name: The name of the option.
        value: Its value.
        expected: What was expected, as it continues "Expected name=value".
        hint: A sentence that says what to do. Default "".

    Raises:
        ConfigError: If `condition` is false.

    Example:
        >>> require(1.3 <= 1, "sampling_rate", 1.3, "in (0, 1]")
        Traceback (most recent call last):
        ...
        halfsilver.errors.ConfigError: Expected sampling_rate=1.3 in (0, 1].
    """
    if not condition:
        raise ConfigError(f"Expected {name}={value!r} {expected}.{' ' + hint if hint else ''}")


def require_numbers(**values: object) -> None:
    """Raise `ConfigError` for a value that is neither a number nor None.

    Args:
        values: Values by the names of their options.

    Raises:
        ConfigError: If one is a text, a truth value or another object.

    Example:
        >>> require_numbers(delta=1e-5, epsilon="2")
        Traceback (most recent call last):
        ...
        halfsilver.errors.ConfigError: Expected epsilon='2' to be a number.
    """
    for name, value in values.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        require(value is None or is_number, name, value, "to be a number")
