"""The entry point: what the command line ends with when it does not end well.

| exit code | |
|---|---|
| 0 | all is well |
| 1 | asked rightly, and the answer is no: an alarm, a check that failed, a budget that is spent |
| 2 | asked wrongly: an option, a name, a file, an extra that is not installed |
| 3 | `halfsilver overlap` found copies |
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
    """Run the command line: what we or the operating system refuse is one line on stderr; a traceback is a bug."""
    try:
        from halfsilver.cli.app import app  # here, because the extra may be missing

        app()
    except (HalfsilverError, OSError) as error:
        sys.stderr.write(f"halfsilver: {error}\n")
        sys.exit(2 if isinstance(error, _WRONG_USE) else 1)


if __name__ == "__main__":
    main()
