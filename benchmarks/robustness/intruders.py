"""Nine intruders on a live SuperLink: none of them gets into a sum, and the honest run completes.

    python -m benchmarks.robustness.intruders --out DIR [--json]

Three honest SuperNodes, a node that plays last round's reply again and one that replies twice, all enrolled; around
them whoever would like to be. Every one of them sends numbers that nobody else sends, and the server of
benchmarks/federated/nodes_app writes down the numbers that reach a sum. The forger is told the ids of the honest nodes'
requests, which it could not see from outside. The test fails if a number of an intruder is found, or a round has no
honest one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from sqlite3 import OperationalError, connect
from typing import Any

from flwr.supercore.date import now

from benchmarks.federated.deployment import teller
from benchmarks.federated.loopback import Loopback
from benchmarks.robustness.rawnode import RawNode, Request
from halfsilver.federated.flower import Enrolment

APP = Path(__file__).parents[1] / "federated" / "nodes_app"
HONEST = {"honest1": 0.01, "honest2": 0.02, "honest3": 0.03}
REPLAY, TWICE, AGAIN = 0.04, 0.05, 0.051  # of the enrolled ones that misbehave
SELF, FORGED, REVOKED, STALE, UNKNOWN = 0.101, 0.102, 0.103, 0.104, 0.105
ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for keys and logs (default: a temporary one)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.out or Path(temporary)).resolve()
        result = intruders(folder, quiet=args.json)
        (folder / "intruders.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(result, indent=1))
    return 0 if not any(result["in_any_sum"].values()) and result["finished"] else 1


def intruders(folder: Path, quiet: bool = False) -> dict[str, Any]:
    say = teller(folder, quiet)
    with Loopback(folder, say) as loop:
        _enrol(loop)
        loop.start_link()
        loop.register(*HONEST, "replay", "twice", "revoked", "self")
        for name, value in (HONEST | {"replay": REPLAY}).items():
            mode = "replay" if name == "replay" else "honest"
            loop.start_node(name, config={"value": value, "delay": 6.0, "mode": mode})
        say("SuperLink and 4 SuperNodes up")
        tried = _at_the_door(loop)
        say(f"at the door: {tried}")
        record = _rounds(loop, tried)
    return _judged(record, tried, say)


def _enrol(loop: Loopback) -> None:
    """The revoked one stands on the list, as revoked; "self" and "unknown" do not; "unknown" is not registered."""
    members = [loop.new_key(n) for n in (*HONEST, "replay", "twice", "revoked")]
    for name in ("self", "unknown"):
        loop.new_key(name)
    Enrolment(tuple(replace(m, revoked=m.name == "revoked") for m in members)).save(loop.folder / "members.json")


def _raw(loop: Loopback, name: str, **options: Any) -> RawNode:
    return RawNode(loop.port, loop.folder / "ca.crt", loop.folder / name, **options)


def _at_the_door(loop: Loopback) -> Counter[str]:
    """Those whom the link itself turns away; a count of 1 is one attempt that got through."""
    through: Counter[str] = Counter()
    port = f"127.0.0.1:{loop.port}"
    short = ["--max-retries", "1", "--max-wait-time", "5", "--superlink", port]
    own = {"value": UNKNOWN}
    loop.start_node("plaintext", *short, "--insecure", key="unknown", config=own)
    loop.start_node("no key", *short, "--root-certificates", loop.folder / "ca.crt", key="unknown", config=own)
    through["unknown key"] += _raw(loop, "unknown").activate()
    late = _raw(loop, "honest1", clock=lambda: now() - timedelta(hours=1))
    through["stale timestamp"] += late.activate()
    two = ("plaintext", "no key")
    loop.wait_for("the end of two that cannot connect", lambda: not any(map(loop.alive, two)), 90)
    for name in two:
        through[name] += "SuperNode ID:" in loop.log_of(name)
    return through


def _rounds(loop: Loopback, tried: Counter[str]) -> dict[str, Any]:
    """The run, with those at work who have got past the door."""
    nodes = {name: _raw(loop, name) for name in ("self", "revoked", "twice")}
    for name, node in nodes.items():
        if not node.activate():
            raise RuntimeError(f"The link should let {name} in: only our list knows better.")
    late = _raw(loop, "honest1", clock=lambda: now() - timedelta(hours=1))
    late.node_id = _node_id(loop, "honest1")
    folder = loop.folder
    config = {"run-dir": folder / "run", "members": folder / "members.json", "record": folder / "record.json"}
    run = loop.run_app(APP, {**config, "rounds": ROUNDS, "round-seconds": 90.0, "min-online": len(HONEST) + 2})
    seen: set[str] = set()
    while run.poll() is None:
        for request, target in _requests(loop, seen):
            attack(nodes, late, request, target, _node_id(loop, "honest1"), tried)
        mine = nodes["twice"].pull()
        if mine is not None:
            tried["twice: first reply"] += nodes["twice"].push(mine, TWICE)
            tried["duplicate in a round"] += nodes["twice"].push(mine, AGAIN)
        tried["asked: self-registered"] += nodes["self"].pull() is not None
        tried["asked: revoked"] += nodes["revoked"].pull() is not None
        time.sleep(0.5)
    out, _ = run.communicate()
    if not (folder / "record.json").exists():
        raise RuntimeError(f"The run left no record.\n{out}\n{loop.log_of('link')[-4000:]}")
    loop.say("the run has ended")
    return dict(json.loads((folder / "record.json").read_text()))


def attack(
    nodes: dict[str, RawNode], late: RawNode, request: Request, target: int, victim: int, tried: Counter[str]
) -> None:
    """Answer a request to another node: in one's own name, in that of the victim, and with an old signature."""
    tried["self-registered key"] += nodes["self"].push(request, SELF)
    tried["revoked key"] += nodes["revoked"].push(request, REVOKED)
    if target == victim:
        tried["stale timestamp"] += late.push(request, STALE)
        tried["forged node id"] += nodes["self"].push(request, FORGED, as_node=target)


def _requests(loop: Loopback, seen: set[str]) -> Iterator[tuple[Request, int]]:
    """New requests to the honest nodes, read from the link's own database."""
    query = "select message_id, run_id, dst_node_id from message_ins where reply_to_message_id = ''"
    honest = {_node_id(loop, name) for name in HONEST}
    for message_id, run_id, node in _query(loop, query):
        if message_id not in seen and node % 2**64 in honest:
            seen.add(message_id)
            yield Request(message_id, run_id % 2**64, 0, b"guess" * 6, [(4, 16), (4,)]), node % 2**64


def _node_id(loop: Loopback, name: str) -> int:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    from halfsilver.federated.flower.keys import public_key

    pem = public_key_to_bytes(public_key((loop.folder / f"{name}.pub").read_bytes()))
    return int(_query(loop, "select node_id from node where public_key = ?", pem)[0][0]) % 2**64


def _query(loop: Loopback, text: str, *values: Any) -> list[tuple[Any, ...]]:
    with closing(connect(f"file:{loop.folder / 'state.db'}?mode=ro", uri=True, timeout=10)) as database:
        try:
            return list(database.execute(text, values))
        except OperationalError:  # it is being written
            return []


def _judged(record: dict[str, Any], tried: Counter[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Who got how far: replies that the link kept, and numbers that reached a sum."""
    # Of the replies with a wrong signature that reached the strategy, those that the forger did not make.
    tried["replayed reply"] = record["refused"].get("signature", 0) - tried["forged node id"]
    sums = [sorted(round(v, 4) for v in r["values"]) for r in record["rounds"]]
    everything = Counter(v for values in sums for v in values)
    numbers = {"self-registered key": SELF, "forged node id": FORGED, "revoked key": REVOKED, "stale timestamp": STALE}
    reached = {name: everything[value] for name, value in numbers.items()} | {
        **dict.fromkeys(("plaintext", "no key", "unknown key"), everything[UNKNOWN]),
        "replayed reply": max(0, everything[REPLAY] - 1),  # the first one is its own
        "duplicate in a round": everything[AGAIN] + sum(n > 1 for values in sums for n in Counter(values).values()),
    }
    result = {
        "finished": record["finished"],
        "sums": sums,
        "honest_in_each": [sum(v in HONEST.values() for v in values) for values in sums],
        "kept_by_the_link": {name: tried[name] for name in reached},
        "asked": {name: tried[f"asked: {name}"] for name in ("self-registered", "revoked")},
        "refused_by_the_strategy": record["refused"],
        "in_any_sum": reached,
    }
    say(f"sums: {sums}; refused by the strategy: {record['refused']}; in any sum: {sum(reached.values())}")
    assert len(reached) == 9, reached
    assert len(sums) == ROUNDS, result
    assert all(result["honest_in_each"]), result
    return result


if __name__ == "__main__":
    sys.exit(main())
