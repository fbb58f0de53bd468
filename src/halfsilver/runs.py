"""The run folder: config, statement, metrics, checkpoint, and one writer at a time."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from halfsilver import _os
from halfsilver.errors import CheckpointCorrupt, ConfigError

SCHEMA_VERSION = 1
UNSAFE = "unsafe-"  # starts the id of a run with a known seed, so that the ledger's chain tells of it


class RunFolder:
    """Names and formats of the files of one run.

    ::

        config.json             what was asked for, versions, the run's id
        statement.json          the privacy statement
        metrics.jsonl           one line per report
        checkpoint.safetensors  the latest state
        ledger.jsonl            unless the run uses the data set's own ledger elsewhere
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.statement = self.path / "statement.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.ledger = self.path / "ledger.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and keep other writers out of it."""
        _os.make_folder(self.path.resolve())
        with _os.lock_file(self.path / ".lock", blocking=False):
            yield

    def claim(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Write the config of a new run, or check it against the one that is being resumed; return it with its id."""
        if not self.config.exists():
            mine = {
                "schema_version": SCHEMA_VERSION,
                "run_id": secrets.token_hex(8),
                **config,
                "versions": versions(),
            }
            write_json(self.config, mine)
            return mine
        found = read_json(self.config)
        for name, value in config.items():
            if found.get(name) != json.loads(json.dumps(value)):
                raise ConfigError(
                    f"Expected {name} of the run in {self.path} to be unchanged on resume: it was "
                    f"{found.get(name)!r} and is now {value!r}. Use another run_dir for another run."
                )
        return found

    def log(self, record: Mapping[str, Any]) -> None:
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def history(self) -> list[dict[str, Any]]:
        """All metric records; a line cut short by a crash is left out."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def clear(self) -> None:
        """Make room for another run. A ledger that lies here stays: what was spent stays spent.

        The config goes last, so that a kill on the way leaves a folder that is still seen to be in use.
        """
        for path in (self.checkpoint, self.metrics, self.statement, self.config):
            path.unlink(missing_ok=True)

    def rewind(self, step: int) -> None:
        """Drop what was logged after `step`, torn line included: those steps are done again."""
        kept = [record for record in self.history() if record["step"] <= step]
        _os.write_atomically(self.metrics, "".join(json.dumps(r) + "\n" for r in kept).encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    _os.write_atomically(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"{path} cannot be read: {error}. Restore it from a copy, or use another folder."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointCorrupt(f"Expected {path} to hold a JSON object, not {type(value).__name__}.")
    return value


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("halfsilver", "torch", "dp-accounting")}
