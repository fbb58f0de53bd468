"""A real deployment on loopback, which loses a node and its link, goes on, and ends with a model and a true ledger.

    python -m benchmarks.federated.deployment --out DIR           keeps everything in DIR; the log is DIR/deployment.log
    python -m benchmarks.federated.deployment --out DIR --json    the result as JSON
    python -m benchmarks.federated.deployment --noise correlated  users in turn, and correlated noise
    python -m benchmarks.federated.deployment --nodes 8           eight nodes of 17 users in place of four of 35
    python -m benchmarks.federated.deployment --nodes 50 --memory    a link that forgets its nodes when it ends
    python -m benchmarks.federated.deployment --every 10          a user takes part in one of ten rounds, not of two

SuperLink with TLS and node authentication, SuperNodes, the app of examples/flower_app. After two rounds a node is
killed, and in the middle of the fourth the link (SIGKILL, with its ServerApp). Then both are started again, and `flwr
run` resumes from the run folder. Takes 2 to 4 minutes on two cores with four nodes.

By default the link keeps its state in SQLite, and knows its nodes after the restart. 50 nodes on two cores lock SQLite
for longer than the link waits, and the run ends in round 1. With `--memory`, the nodes are registered and started again
after the restart. A request starts a process, which imports torch. 50 of them at once need more than 24 GB, so ask few
of many nodes in a round, with `--every`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

from safetensors.torch import load_file

from benchmarks.federated.loopback import Loopback
from halfsilver.federated.flower import Enrolment

APP = Path(__file__).parents[2] / "examples" / "flower_app"
USERS, ROUNDS = 140, 6
_AT_ONCE = 10  # SuperNodes that start together


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A deployment: where it is kept, its nodes, and what the app is asked to do."""

    folder: Path
    nodes: int = 4
    correlated: bool = False
    database: bool = True
    every: int = 2

    @property
    def names(self) -> list[str]:
        return [f"node{i + 1}" for i in range(self.nodes)]

    @property
    def users_each(self) -> int:
        return USERS // self.nodes

    @property
    def round_seconds(self) -> float:
        """How long a round waits for replies. Each reply takes a process of some seconds of processor time."""
        return 90.0 + 3.0 * self.nodes

    @property
    def config(self) -> dict[str, Any]:
        """The app's configuration."""
        return {
            "run-dir": self.folder / "run",
            "members": self.folder / "members.json",
            "data": self.folder / "data",
            "model-file": self.folder / "model.safetensors",
            "rounds": ROUNDS,
            "round-seconds": self.round_seconds,
            "min-online": self.nodes - 1,
            "correlated": self.correlated,
            "every": self.every,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for keys, logs, run and model (default: a temporary one)")
    parser.add_argument("--noise", choices=("independent", "correlated"), default="independent")
    parser.add_argument("--nodes", type=int, default=Scene.nodes)
    parser.add_argument("--every", type=int, default=Scene.every, help="a user takes part in one of so many rounds")
    parser.add_argument("--memory", action="store_true", help="the link keeps its state in memory, not in SQLite")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.out or Path(temporary)).resolve()
        scene = Scene(
            folder=folder,
            nodes=args.nodes,
            correlated=args.noise == "correlated",
            database=not args.memory,
            every=args.every,
        )
        result = deployment(scene, quiet=args.json)
    if args.json:
        print(json.dumps(result, indent=1))
    return 0


def deployment(scene: Scene, quiet: bool = False) -> dict[str, Any]:
    """Raises if anything is not as it should be."""
    folder, names = scene.folder, scene.names
    say = teller(folder, quiet)
    with Loopback(folder, say) as loop:
        split: list[Any] = [sys.executable, APP / "split.py", folder / "data", "--nodes", str(scene.nodes)]
        subprocess.run(split, check=True, stdout=PIPE)
        Enrolment(tuple(loop.new_key(n, scene.users_each) for n in names)).save(folder / "members.json")
        say(f"certificates, {scene.nodes} node keys, members.json and data files made")
        _start(loop, scene)
        killed = _interrupted(loop, scene)
        if scene.database:
            loop.start_link()
            start_node(loop, names[-1])
            say(f"SuperLink and {names[-1]} started again; the other nodes reconnect by themselves")
        else:
            for name in names[:-1]:
                loop.kill(name)
            _start(loop, scene)
        lines, silent = _finished(loop, scene)
    result = _checked(scene, lines, killed, silent)
    say(f"all processes ended; ledger: {result['spent_steps']} steps spent for {result['updates']} updates; verified")
    return result


def _start(loop: Loopback, scene: Scene) -> None:
    """A link that knows no node, and all nodes."""
    names = scene.names
    loop.start_link(scene.database)
    loop.say("SuperLink up: TLS, node authentication")
    for i in range(0, len(names), _AT_ONCE):
        some = names[i : i + _AT_ONCE]
        loop.register(*some)
        for name in some:
            start_node(loop, name)
        if len(names) > _AT_ONCE:
            loop.wait_until_up(some)
    for name in names if len(names) > _AT_ONCE else ():
        loop.yield_to_the_link(name)
    loop.say(f"{len(names)} SuperNodes registered and started")


def start_node(loop: Loopback, name: str) -> None:
    loop.start_node(name, config={"data": str(loop.folder / "data" / f"{name}.safetensors")})


def _interrupted(loop: Loopback, scene: Scene) -> dict[str, int]:
    """The first run: after two rounds a node dies, in the middle of the fourth the link, and with it the run."""
    folder, last = scene.folder, scene.names[-1]
    run = loop.run_app(APP, scene.config)
    loop.say("flwr run: the ServerApp starts")
    wait_for_round(loop, scene, run, 2)
    loop.kill(last)
    loop.say(f"round {rounds_done(folder)} done; {last} killed")
    wait_for_round(loop, scene, run, 3)
    loop.wait_for("the next round", lambda: spent(folder) > rounds_done(folder), 60 + scene.round_seconds)
    loop.kill("link")
    run.kill()
    run.communicate(timeout=30)  # closes its pipe
    at = {"updates": rounds_done(folder), "spent": spent(folder)}
    loop.say(f"round {at['updates']} done, round {at['spent']} begun; SuperLink killed")
    return at


def wait_for_round(loop: Loopback, scene: Scene, run: subprocess.Popen[str], number: int) -> None:
    def there() -> bool:
        if run.poll() is not None:
            raise RuntimeError(f"The run ended early.\n{run.communicate()[0]}\n{loop.log_of('link')[-4000:]}")
        return rounds_done(scene.folder) >= number

    loop.wait_for(f"round {number}", there, 120 + 4 * scene.round_seconds)


def spent(folder: Path) -> int:
    """Steps in the ledger of the run folder, finished or not."""
    ledger = folder / "run" / "ledger.jsonl"
    records = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    return sum(record["count"] for record in records if record["type"] == "intent")


def rounds_done(folder: Path) -> int:
    log = folder / "run" / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def _finished(loop: Loopback, scene: Scene) -> tuple[list[str], int]:
    """What the resumed run says of its rounds, and in how many of them no node answered."""
    run = loop.run_app(APP, scene.config)
    loop.say("flwr run again: the run is resumed")
    out, _ = run.communicate(timeout=120 + 4 * scene.round_seconds)
    lines = [line for line in out.splitlines() if line.startswith("round ")]
    if not (scene.folder / "model.safetensors").exists():
        raise RuntimeError(f"No model was written.\n{out}\n{loop.log_of('link')[-4000:]}")
    for line in lines:
        loop.say(line)
    return lines, out.count("no node answered")


def _checked(scene: Scene, lines: Sequence[str], killed: Mapping[str, int], silent: int) -> dict[str, Any]:
    folder = scene.folder
    command = [str(Path(sys.executable).parent / "halfsilver"), "verify", str(folder / "run"), "--json"]
    verified = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    weights = load_file(folder / "model.safetensors")
    history = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    result = {
        "nodes": scene.nodes,
        "every": scene.every,
        "link": "database" if scene.database else "memory",
        "sampler": verified["statement"]["sampler"],
        "population": scene.nodes * scene.users_each,
        "updates": verified["step"],
        "spent_steps": verified["statement"]["spent_so_far"]["steps"],
        "when_the_link_died": dict(killed),
        "rounds_after": len(lines),
        "finished": verified["finished"],
        "parameters": sum(t.numel() for t in weights.values()),
        "test_error_first": history[0]["error"],
        "test_error_last": history[-1]["error"],
        "silent_rounds": silent,
        "epsilon": verified["statement"]["epsilon_planned"]["pld"],
        "seconds": float((folder / "seconds").read_text()),
    }
    assert (verified["step"], verified["finished"]) == (ROUNDS, True), result
    # Every round that was begun is counted, the one that the link took with it too, and no other.
    assert result["spent_steps"] == spent(folder) == killed["spent"] + len(lines), result
    assert (killed["spent"], len(lines)) == (killed["updates"] + 1, ROUNDS - killed["updates"]), result
    assert result["silent_rounds"] == 0, result
    assert all(bool(t.isfinite().all()) for t in weights.values()), "the model has weights that are not finite"
    return result


def teller(folder: Path, quiet: bool) -> Callable[[str], None]:
    """Writes each line, with the seconds since the start, to the log and, unless it is `quiet`, to the terminal."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "deployment.log"
    log.unlink(missing_ok=True)

    def say(line: str) -> None:
        seconds = time.monotonic() - started
        with log.open("a") as f:
            f.write(f"{seconds:6.1f} s  {line}\n")
        (folder / "seconds").write_text(f"{seconds:.1f}")
        if not quiet:
            print(f"{seconds:6.1f} s  {line}", flush=True)

    return say


if __name__ == "__main__":
    sys.exit(main())
