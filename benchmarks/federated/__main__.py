"""What a federated round costs beyond its clients.

    python -m benchmarks.federated                     all parts, as tables
    python -m benchmarks.federated --json --out FILE   the same as JSON
    python -m benchmarks.federated --parts core,population --rounds 30

core        a round of 100 of 342,477 users who do nothing, against a plain loop of clip, sum and noise over the same
            arrays; in turns, the ratio is taken within each turn. At most 2.
population  time and memory of a round with 1,000 to 342,477 users in an SQLite file, each in a fresh process
clients     users of Stack Exchange (HALFSILVER_DATA), or made-up ones, train an LSTM: what the round adds to the sum
            of their training times. At most 0.1.
flower      a round of Flower's own simulation with 100 nodes that do nothing, where Ray is installed or
            --flower-python names a Python that has it

Medians, with range and number of repetitions. Times of the processor are given too: the ratio of these is the steadier
one on a machine that does other things as well. All in one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import show
from benchmarks.federated import clients, core, flower, population
from benchmarks.federated.rounds import Row
from benchmarks.speed.__main__ import circumstances, say

PARTS = ("core", "population", "clients", "flower")
PARAMETERS = 500_416


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    torch.set_num_threads(1)
    result: Row = {}
    for part in args.parts:
        say(part)
        result[part] = _MEASURE[part](args)
    result |= circumstances(threads=1, rounds=args.rounds, load=[round(x, 2) for x in os.getloadavg()])
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result)) if args.json else _print(result)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.federated", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--users", type=int, default=population.SIZES[-1], help="the largest population")
    parser.add_argument("--folder", type=Path, help="keep the SQLite files here, and use those that are there")
    parser.add_argument("--flower-python", help="a Python with flwr[simulation]")
    parser.add_argument("--tiny", action="store_true", help="small models and cohorts: whether it runs, not how fast")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the JSON to this file as well")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    return args


def _parts(text: str) -> list[str]:
    found = [name for name in text.split(",") if name]
    if not found or not set(found) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r}: expected names out of {', '.join(PARTS)}")
    return found


def _core(args: argparse.Namespace) -> Row:
    small: dict[str, Any] = {"cohort": 10, "hidden": 8} if args.tiny else {}
    return core.measure(args.users, rounds=args.rounds, **small)


def _population(args: argparse.Namespace) -> list[Row]:
    sizes = (*(size for size in population.SIZES if size < args.users), args.users)
    with tempfile.TemporaryDirectory() as folder:
        return population.measure(sizes, args.folder or Path(folder), rounds=args.rounds)


def _clients(args: argparse.Namespace) -> Row:
    data = os.environ.get("HALFSILVER_DATA")
    if args.tiny:
        return clients.measure(None, rounds=args.rounds, cohort=4, words=50, units=8)
    return clients.measure(Path(data) if data else None, rounds=max(1, args.rounds // 4), cohort=50)


def _flower(args: argparse.Namespace) -> Row:
    rounds = max(1, args.rounds // 3)
    return flower.measure(args.flower_python, nodes=100, rounds=rounds, parameters=PARAMETERS)


_MEASURE = {"core": _core, "population": _population, "clients": _clients, "flower": _flower}


def _print(result: Row) -> None:
    for part in PARTS:
        found = result.get(part, [])
        rows = [_flat(row) for row in (found if isinstance(found, list) else [found])]
        if part == "population":
            show.show(part, rows, list(dict.fromkeys(name for row in rows for name in row)))
        elif rows:
            show.show(part, [{"what": k, "value": v} for k, v in rows[0].items()], ("what", "value"))
    show.show("circumstances", [{"cores": os.cpu_count(), "load": str(result["load"])}], ("cores", "load"))


def _flat(row: Row) -> Row:
    """Medians with their ranges as text, and what is nested beside what is not."""
    flat: Row = {}
    for name, value in row.items():
        if isinstance(value, dict) and "median" in value:
            flat[name] = "{median:.4g} ({min:.4g} to {max:.4g}, n={reps})".format(**value)
        elif isinstance(value, dict):
            flat |= {f"{name}.{inner}": text for inner, text in _flat(value).items()}
        else:
            flat[name] = value
    return flat


if __name__ == "__main__":
    sys.exit(main())
