"""SuperNodes by the dozen on loopback, with a client that needs NumPy alone.

    python -m benchmarks.federated.nodes --faulty --json      20 nodes, 7 of them faulty, 3 rounds
    python -m benchmarks.federated.nodes --nodes 50 --json    50 nodes, 3 rounds: how long, and how much memory

Each SuperNode is two processes, and each request starts a third. Memory is the proportional set size (PSS), in which
pages that processes share are counted once, summed over the processes at the end of the last round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.federated.deployment import teller
from benchmarks.federated.loopback import Loopback, marked
from halfsilver.federated.flower import Enrolment

APP = Path(__file__).parent / "nodes_app"
FAULTS = ("nan", "large", "zeros", "shape", "hang", "crash", "replay")
ROUNDS = 3
_AT_ONCE = 10  # SuperNodes that start together


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--faulty", action="store_true", help="some of the nodes, each in its own way")
    parser.add_argument("--round-seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path, help="folder for keys and logs (default: a temporary one)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.out or Path(temporary)).resolve()
        result = run(folder, args.nodes, args.faulty, args.round_seconds, quiet=args.json)
    if args.json:
        print(json.dumps(result, indent=1))
    return 0


def modes(nodes: int, faulty: bool) -> list[str]:
    """At least 30 % are faulty, and of 20 nodes one in each way."""
    bad = max(math.ceil(0.3 * nodes), len(FAULTS)) if faulty else 0
    return [FAULTS[i % len(FAULTS)] for i in range(bad)] + ["honest"] * (nodes - bad)


def run(folder: Path, nodes: int, faulty: bool, round_seconds: float, quiet: bool) -> dict[str, Any]:
    say = teller(folder, quiet)
    kinds, names = modes(nodes, faulty), [f"node{i + 1}" for i in range(nodes)]
    values = {name: round(0.001 * (i + 1), 4) for i, name in enumerate(names)}
    with Loopback(folder, say) as loop:
        Enrolment(tuple(loop.new_key(name) for name in names)).save(folder / "members.json")
        loop.start_link(database=False)
        started = time.monotonic()
        for i in range(0, nodes, _AT_ONCE):
            loop.register(*names[i : i + _AT_ONCE])
            for name, kind in list(zip(names, kinds, strict=True))[i : i + _AT_ONCE]:
                loop.start_node(name, config={"value": values[name], "mode": kind})
            loop.wait_until_up(names[i : i + _AT_ONCE])
        for name in names:
            loop.yield_to_the_link(name)
        start_seconds = time.monotonic() - started
        say(f"{nodes} SuperNodes up after {start_seconds:.0f} s")
        record, memory = _trained(loop, folder, nodes, round_seconds)
    return _judged(record, memory, dict(zip(names, kinds, strict=True)), values, start_seconds)


def _trained(loop: Loopback, folder: Path, nodes: int, round_seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    paths = {"run-dir": folder / "run", "members": folder / "members.json", "record": folder / "record.json"}
    numbers = {"rounds": ROUNDS, "round-seconds": round_seconds, "min-online": nodes}
    run, most = loop.run_app(APP, {**paths, **numbers}), memory(loop)
    while run.poll() is None:
        most = max(most, memory(loop), key=lambda m: float(m["total_mb"]))
        time.sleep(2)
    out, _ = run.communicate()
    if not (folder / "record.json").exists():
        raise RuntimeError(f"The run left no record.\n{out}\n{loop.log_of('link')[-4000:]}")
    loop.say(f"{ROUNDS} rounds done")
    return json.loads((folder / "record.json").read_text()), most


def memory(loop: Loopback) -> dict[str, float]:
    """PSS in MB by kind of process, and their number."""
    kinds: dict[str, list[float]] = {}
    for pid in marked(loop.mark):
        try:
            name = (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            pss = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        except OSError:  # it has just ended
            continue
        found = re.search(r"flower-supernode|flower-superexec|flower-superlink|flwr-clientapp|flwr-serverapp", name)
        if pss and found:
            kinds.setdefault(found.group(), []).append(int(pss.group(1)) / 1024)
    each = {f"{kind}_mb_each": round(sum(v) / len(v), 1) for kind, v in kinds.items()}
    count = {f"{kind}_processes": len(v) for kind, v in kinds.items()}
    return {"total_mb": round(sum(map(sum, kinds.values())), 1), **each, **count}


def _judged(
    record: dict[str, Any],
    memory: dict[str, Any],
    kinds: dict[str, str],
    values: dict[str, float],
    start_seconds: float,
) -> dict[str, Any]:
    honest = {values[name] for name, kind in kinds.items() if kind == "honest"}
    replay = {values[name] for name, kind in kinds.items() if kind == "replay"}
    sums = [[round(v, 4) for v in r["values"]] for r in record["rounds"]]
    result = {
        "nodes": len(kinds),
        "faulty": sum(kind != "honest" for kind in kinds.values()),
        "finished": record["finished"],
        "start_seconds": round(start_seconds, 1),
        "round_seconds": [round(r["seconds"], 1) for r in record["rounds"]],
        "honest_in_each": [len(honest & set(values)) for values in sums],
        "clipped_in_each": [sum(abs(v) > 1e8 for v in values) for values in sums],
        "replayed_in_later": sum(len(replay & set(values)) for values in sums[1:]),
        "refused": record["refused"],
        "memory": memory,
        "cores": os.cpu_count(),
    }
    assert len(sums) == ROUNDS, result
    assert result["replayed_in_later"] == 0, result
    return result


if __name__ == "__main__":
    sys.exit(main())
