"""The run folder: config, statement, metrics, checkpoint, and one writer at a time."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from halfsilver._core import system
from halfsilver.errors import CheckpointCorrupt, ConfigError, RunFolderBusy

SCHEMA_VERSION = 1
_SETTINGS, PROBE = "optimizer_settings", "probe"
UNSAFE = "unsafe-"  # starts the id of a run with a known seed, so that the ledger's chain tells of it


class RunFolder:
    """Names and formats of the files of one run.

    ::

        config.json             what was asked for, versions, the run's id
        statement.json          the privacy statement
        metrics.jsonl           one line per report
        checkpoint.safetensors  the latest state
        model.safetensors       the weights of a finished run, under the names of the model
        place.json              which folder this is, and who has gone on with the run here: a copy is recognised by it
        attendance/             users of the last rounds, where users who are present take part with correlated noise
        ledger.jsonl            unless the run uses the data set's own ledger elsewhere; beside it ledger.jsonl.head
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.statement = self.path / "statement.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.weights = self.path / "model.safetensors"
        self.place = self.path / "place.json"
        self.attendance = self.path / "attendance"
        self.ledger = self.path / "ledger.jsonl"

    def digests(self, *more: Path) -> dict[str, str]:
        """SHA-256 of what a run leaves for good, by name: its checkpoint and its metrics."""
        files = (file for file in (self.checkpoint, self.metrics, *more) if file.exists())
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    def settle(self) -> dict[str, str]:
        """The digests, once a power cut can no longer change what they are of: lines of metrics are not synced."""
        if self.metrics.exists():
            system.write_atomically(self.metrics, self.metrics.read_bytes())
        return self.digests()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and keep other writers out of it."""
        system.make_folder(self.path.resolve())
        with system.lock_file(self.path / ".lock", blocking=False):
            yield

    def claim(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Write the config of a new run, or check it against the one that is being resumed; return it with its id."""
        if not self.config.exists():
            # How long a selection takes tells how many runs it had, so its files do not say when it began.
            begun = {} if "trials" in config.get("plan", {}) else {"begun": _today()}
            mine = {"schema_version": SCHEMA_VERSION, **config, "versions": versions(), **begun}
            mine["run_id"] = new_run_id(mine)
            write_json(self.config, mine)
            return mine
        found = read_json(self.config)
        if not isinstance(found.get("run_id"), str):
            raise CheckpointCorrupt(f"Expected {self.config} to name its run_id. {_WAY_OUT}")
        now = json.loads(json.dumps(config))
        for name in sorted(now.keys() | found.keys() - {"schema_version", "run_id", "versions", "begun"}):
            if not _same(name, found, now):
                raise ConfigError(
                    f"Expected {name} of the run in {self.path} to be unchanged on resume: it was "
                    f"{found.get(name)!r} and is now {now.get(name)!r}. Use another run_dir for another run."
                )
        return found

    def take(self, owner: str, last: str) -> bool:
        """Note that `owner` goes on here with a run whose latest steps `last` took.

        Returns whether the run was taken over from another folder, which deleting `place` declares, now or before.
        """
        here, known = system.place_of(self.path), read_json(self.place) if self.place.exists() else {}
        owners, taken = [*known.get("owners", []), owner], known.get("taken_over", not known and last != "")
        same_start = known.get("boot") == here["boot"]  # else the device may have another number now
        moved = known.get("inode") != here["inode"] or (same_start and known.get("device") != here["device"])
        if known and (moved or last not in ["", *owners]):
            raise RunFolderBusy(
                f"{self.path} is not the folder in which this run went on last: it is a copy, was restored or moved to "
                "another disk, or the run has gone on elsewhere since. A run goes on in one folder only. If that is "
                f"this one, and never again the other, delete {self.place} and call fit again: it takes the run over."
            )
        write_json(self.place, {**here, "owners": owners, "taken_over": taken})
        return bool(taken)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record. JSON has no NaN and no infinity; null stands for them, and is read as NaN."""
        record = {name: value if _is_json(value) else None for name, value in record.items()}
        with system.confirmed(self.metrics), open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def history(self) -> list[dict[str, Any]]:
        """All metric records. They are not synced, so a crash may leave holes: what is not a record is left out."""
        if not self.metrics.exists():
            return []
        found = map(_metric, self.metrics.read_bytes().splitlines(keepends=True))
        return [record for record in found if record is not None]

    def clear(self) -> None:
        """Make room for another run. A ledger that lies here stays: what was spent stays spent.

        The config goes last, so that a kill on the way leaves a folder that is still seen to be in use.
        """
        shutil.rmtree(self.attendance, ignore_errors=True)
        for path in (self.place, self.weights, self.checkpoint, self.metrics, self.statement, self.config):
            path.unlink(missing_ok=True)

    def rewind(self, step: int) -> None:
        """Drop what was logged after `step`, torn line included: those steps are done again."""
        kept = [record for record in self.history() if record["step"] <= step]
        lines = ({name: v if _is_json(v) else None for name, v in r.items()} for r in kept)
        system.write_atomically(self.metrics, "".join(json.dumps(r) + "\n" for r in lines).encode())


def _same(name: str, found: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether an entry of the config is unchanged. Versions of torch differ in which settings an optimizer has."""
    if name == PROBE:  # `select` compares it, while the selection has not ended
        return True
    if name != _SETTINGS:
        return bool(found.get(name) == now.get(name))
    if name not in found:  # a run of an earlier version
        return True
    before, after = found[name], now.get(name)
    if not isinstance(before, list) or not isinstance(after, list) or len(before) != len(after):
        return False
    return all(a[key] == b[key] for a, b in zip(before, after, strict=True) for key in a.keys() & b.keys())


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _metric(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {name: math.nan if value is None else value for name, value in record.items()}


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def new_run_id(config: Mapping[str, Any]) -> str:
    """A name that holds a digest of the config: what is in the config, the ledger's chain then vouches for."""
    unsafe = UNSAFE if config.get("unsafe_seed") is not None else ""
    return f"{unsafe}{secrets.token_hex(8)}-{config_digest(config)}"


def config_digest(config: Mapping[str, Any]) -> str:
    """Of all but the run's name."""
    text = json.dumps({name: value for name, value in config.items() if name != "run_id"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def json_text(value: Mapping[str, Any]) -> bytes:
    """The one form in which files of a run folder are written."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    system.write_atomically(path, json_text(value))


def read_json(path: Path) -> dict[str, Any]:
    try:
        return _object(path, path.read_bytes())
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}. {_WAY_OUT}") from error


_WAY_OUT = "Restore it from a copy, or use another folder."


def _object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}. {_WAY_OUT}") from error
    if not isinstance(value, dict):
        raise CheckpointCorrupt(f"Expected {path} to hold a JSON object, not {type(value).__name__}.")
    return value


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("halfsilver", "torch", "dp-accounting")}
