"""Typed errors. Each message says what was wrong, with its name, value and range, and what to do."""

from __future__ import annotations


class HalfsilverError(Exception):
    """Base of every error that halfsilver raises on purpose."""


class ConfigError(HalfsilverError, ValueError):
    """An option has a value that cannot be used."""


class BudgetExceeded(HalfsilverError):
    """The next private step would spend more than the budget of the data set; nothing was touched."""


class LedgerCorrupt(HalfsilverError):
    """A privacy ledger is not the file that its own chain, or a checkpoint, says it is."""


class CheckpointCorrupt(HalfsilverError):
    """A checkpoint cannot be read, or belongs to another plan, model or ledger."""


class RunFolderBusy(HalfsilverError):
    """Another process is writing to this run folder or ledger."""


class StorageError(HalfsilverError, OSError):
    """The operating system refused to write or to sync a file; what was not confirmed was not acted upon."""


class UnsupportedLayer(HalfsilverError):
    """A module cannot be trained with a per-example guarantee, or not by the chosen backend."""


class PrivateDataError(HalfsilverError):
    """Private data was given, or asked for, in a way that would break the guarantee."""


class ConvergenceError(HalfsilverError):
    """A solver on the public loss did not reach its tolerance."""


class DataMissing(HalfsilverError):
    """A file of a standard data set is not there, or not whole."""


class MissingExtra(HalfsilverError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; get it with: pip install 'halfsilver[{extra}]'")


class PlatformUnsupported(HalfsilverError):
    """The operating system lacks something that the ledger's guarantee needs."""


def require(condition: bool, name: str, value: object, expected: str, hint: str = "") -> None:
    """Raise `ConfigError` with name, value and range unless `condition` holds.

    >>> require(1.3 <= 1, "sampling_rate", 1.3, "in (0, 1]")
    Traceback (most recent call last):
    ...
    halfsilver.errors.ConfigError: Expected sampling_rate=1.3 in (0, 1].
    """
    if not condition:
        raise ConfigError(f"Expected {name}={value!r} {expected}.{' ' + hint if hint else ''}")
