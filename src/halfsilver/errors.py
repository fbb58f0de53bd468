"""Typed errors. Each message gives the name, the value, the allowed range and what to do."""

from __future__ import annotations


class HalfsilverError(Exception):
    """Base class of every error that halfsilver raises on purpose."""


class ConfigError(HalfsilverError, ValueError):
    """An option has a value that cannot be used."""


class BudgetExceeded(HalfsilverError):
    """The next private step would exceed the budget of the data set. No private record was read."""


class LedgerCorrupt(HalfsilverError):
    """A privacy ledger does not match its own hash chain, or the checkpoint that rests on it."""


class CheckpointCorrupt(HalfsilverError):
    """A checkpoint cannot be read, or belongs to another plan, model or ledger."""


class RunFolderBusy(HalfsilverError):
    """Another process is writing to this run folder or ledger."""


class StorageError(HalfsilverError, OSError):
    """The operating system could not write or sync a file. No step was released that is not on disk."""


class UnsupportedLayer(HalfsilverError):
    """A module cannot be trained with a per-example guarantee, or the chosen backend does not support it."""


class PrivateDataError(HalfsilverError):
    """Private data were passed, or requested, in a way that would break the guarantee."""


class ConvergenceError(HalfsilverError):
    """A solver on the public loss did not reach its tolerance."""


class DataMissing(HalfsilverError):
    """A file of a standard data set is missing or incomplete."""


class MissingExtra(HalfsilverError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed. Install it with: pip install 'halfsilver[{extra}]'")


class PlatformUnsupported(HalfsilverError):
    """The operating system lacks a feature that the ledger's guarantee needs."""


def require(condition: bool, name: str, value: object, expected: str, hint: str = "") -> None:
    """Raise `ConfigError` with name, value and allowed range unless `condition` holds.

    >>> require(1.3 <= 1, "sampling_rate", 1.3, "in (0, 1]")
    Traceback (most recent call last):
    ...
    halfsilver.errors.ConfigError: Expected sampling_rate=1.3 in (0, 1].
    """
    if not condition:
        raise ConfigError(f"Expected {name}={value!r} {expected}.{' ' + hint if hint else ''}")
