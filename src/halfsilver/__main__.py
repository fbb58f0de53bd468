"""The entry point, and the exit codes of the command line.

| exit code | |
|---|---|
| 0 | success |
| 1 | correct usage with a negative result: an alarm, a failed check, a spent budget |
| 2 | wrong usage: an option, a name, a file, an extra that is not installed |
| 3 | `halfsilver overlap` detected copies |
"""

from __future__ import annotations

import sys

from halfsilver.errors import (
    ConfigError,
    DataMissing,
    HalfsilverError,
    MissingExtra,
    PrivateDataError,
    UnsupportedLayer,
)

_WRONG_USE = (ConfigError, DataMissing, FileNotFoundError, MissingExtra, PrivateDataError, UnsupportedLayer)


def main() -> None:
    """Run the command line. Expected errors are one line on stderr, so a traceback is a bug."""
    try:
        from halfsilver.cli.app import app  # here, because the extra may be missing

        app()
    except (HalfsilverError, OSError) as error:
        sys.stderr.write(f"halfsilver: {error}\n")
        sys.exit(2 if isinstance(error, _WRONG_USE) else 1)


if __name__ == "__main__":
    main()
