"""A real deployment on loopback, which loses a node and its link, goes on, and ends with a model and a true ledger.

    python -m benchmarks.federated.deployment --out DIR           keeps everything in DIR; the log is DIR/deployment.log
    python -m benchmarks.federated.deployment --out DIR --json    the result as JSON
    python -m benchmarks.federated.deployment --noise correlated  users in turn, and correlated noise

SuperLink with TLS and node authentication, four SuperNodes of 35 users each, the app of examples/flower_app. After
two rounds a node is killed, and in the middle of the fourth the link (SIGKILL, with its ServerApp). Then both are
started again, and `flwr run` goes on where the run folder is. Takes 2 to 4 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from benchmarks.federated.loopback import Loopback
from halfsilver.federated.flower import Enrolment
from halfsilver.privacy.correlated import inverse
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.strategies import Correlated

APP = Path(__file__).parents[2] / "examples" / "flower_app"
NODES, USERS, ROUNDS = 4, 35, 6
_SECONDS = 480


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for keys, logs, run and model (default: a temporary one)")
    parser.add_argument("--noise", choices=("independent", "correlated"), default="independent")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.out or Path(temporary)).resolve()
        result = deployment(folder, quiet=args.json, correlated=args.noise == "correlated")
    if args.json:
        print(json.dumps(result, indent=1))
    return 0


def deployment(folder: Path, quiet: bool = False, correlated: bool = False) -> dict[str, Any]:
    """Raises if anything is not as it should be."""
    say = teller(folder, quiet)
    with Loopback(folder, say) as loop:
        names = [f"node{i + 1}" for i in range(NODES)]
        subprocess.run(
            [sys.executable, APP / "split.py", folder / "data", "--nodes", str(NODES)], check=True, stdout=PIPE
        )
        Enrolment(tuple(loop.new_key(n, USERS) for n in names)).save(folder / "members.json")
        say(f"certificates, {NODES} node keys, members.json and data files made")
        _start(loop, names)
        killed = _interrupted(loop, folder, correlated)
        loop.start_link()
        start_node(loop, names[-1])
        say(f"SuperLink and {names[-1]} started again; the other nodes reconnect by themselves")
        lines = _finished(loop, folder, correlated)
    result = _checked(folder, lines, killed)
    say(f"all processes ended; ledger: {result['spent_steps']} steps spent for {result['updates']} updates; verified")
    return result


def _start(loop: Loopback, names: Sequence[str]) -> None:
    loop.start_link()
    loop.say("SuperLink up: TLS, node authentication")
    loop.register(*names)
    for name in names:
        start_node(loop, name)
    loop.say(f"{len(names)} SuperNodes registered and started")


def start_node(loop: Loopback, name: str) -> None:
    loop.start_node(name, config={"data": str(loop.folder / "data" / f"{name}.safetensors")})


def config(folder: Path, correlated: bool = False) -> dict[str, Any]:
    return {
        "run-dir": folder / "run",
        "members": folder / "members.json",
        "data": folder / "data",
        "model-file": folder / "model.safetensors",
        "rounds": ROUNDS,
        "round-seconds": 90.0,
        "min-online": NODES - 1,
        "correlated": correlated,
    }


def _interrupted(loop: Loopback, folder: Path, correlated: bool) -> dict[str, int]:
    """The first run: after two rounds a node dies, in the middle of the fourth the link, and with it the run."""
    run = loop.run_app(APP, config(folder, correlated))
    loop.say("flwr run: the ServerApp starts")
    wait_for_round(loop, folder, run, 2)
    loop.kill(f"node{NODES}")
    loop.say(f"round {rounds_done(folder)} done; node{NODES} killed")
    wait_for_round(loop, folder, run, 3)
    loop.wait_for("the next round", lambda: spent(folder) > rounds_done(folder), 60)
    loop.kill("link")
    run.kill()
    at = {"updates": rounds_done(folder), "spent": spent(folder)}
    loop.say(f"round {at['updates']} done, round {at['spent']} begun; SuperLink killed")
    return at


def wait_for_round(loop: Loopback, folder: Path, run: subprocess.Popen[str], number: int) -> None:
    def there() -> bool:
        if run.poll() is not None:
            raise RuntimeError(f"The run ended early.\n{run.communicate()[0]}\n{loop.log_of('link')[-4000:]}")
        return rounds_done(folder) >= number

    loop.wait_for(f"round {number}", there, _SECONDS)


def spent(folder: Path) -> int:
    """Steps in the ledger of the run folder, finished or not."""
    ledger = folder / "run" / "ledger.jsonl"
    records = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    return sum(record["count"] for record in records if record["type"] == "intent")


def rounds_done(folder: Path) -> int:
    log = folder / "run" / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def _finished(loop: Loopback, folder: Path, correlated: bool) -> list[str]:
    run = loop.run_app(APP, config(folder, correlated))
    loop.say("flwr run again: the run folder goes on")
    out, _ = run.communicate(timeout=_SECONDS)
    lines = [line for line in out.splitlines() if line.startswith("round ")]
    if not (folder / "model.safetensors").exists():
        raise RuntimeError(f"No model was written.\n{out}\n{loop.log_of('link')[-4000:]}")
    for line in lines:
        loop.say(line)
    return lines


def _checked(folder: Path, lines: Sequence[str], killed: Mapping[str, int]) -> dict[str, Any]:
    command = [str(Path(sys.executable).parent / "halfsilver"), "verify", str(folder / "run"), "--json"]
    verified = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    weights = load_file(folder / "model.safetensors")
    history = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    result = {
        "nodes": NODES,
        "sampler": verified["statement"]["sampler"],
        "population": NODES * USERS,
        "updates": verified["step"],
        "spent_steps": verified["statement"]["spent_so_far"]["steps"],
        "when_the_link_died": dict(killed),
        "rounds_after": len(lines),
        "finished": verified["finished"],
        "parameters": sum(t.numel() for t in weights.values()),
        "test_error_first": history[0]["error"],
        "test_error_last": history[-1]["error"],
        "rounds_heard": sum(h["released_norm"] > noise_alone(verified["statement"]["plan"], weights) for h in history),
        "epsilon": verified["statement"]["epsilon_planned"]["pld"],
        "seconds": float((folder / "seconds").read_text()),
    }
    assert (verified["step"], verified["finished"]) == (ROUNDS, True), result
    # Every round that was begun is counted, the one that the link took with it too, and no other.
    assert result["spent_steps"] == spent(folder) == killed["spent"] + len(lines), result
    assert (killed["spent"], len(lines)) == (killed["updates"] + 1, ROUNDS - killed["updates"]), result
    assert 2 * result["rounds_heard"] > ROUNDS, result
    assert all(bool(t.isfinite().all()) for t in weights.values()), "the model has weights that are not finite"
    return result


def noise_alone(fields: Mapping[str, Any], weights: Mapping[str, Tensor]) -> float:
    """A norm that a release without any reply exceeds once in a million rounds (5 standard deviations)."""
    plan, numbers = PrivacyPlan.from_dict(fields), float(sum(t.numel() for t in weights.values()))
    scale = plan.step_noise * plan.max_grad_norm / plan.expected_batch_size
    if isinstance(plan.noise, Correlated):  # a step has its own fresh noise, and a part of that of earlier ones
        scale *= float(inverse(plan.noise.coefficients.column(plan.max_releases)).norm())
    return scale * (math.sqrt(numbers) + 5 / math.sqrt(2))


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
