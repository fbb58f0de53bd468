"""Several processes: real ranks on gloo, with DistributedDataParallel and with fully_shard, against one process."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from torch import Tensor, nn

import halfsilver as hs
from halfsilver._core.distributed import World
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.runs.verify import verify
from tests._core.distributed_worker import convolution, long_trainer, network, rows
from tests.markdown import ROOT, blocks

WORKER = Path(__file__).parent / "distributed_worker.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SIZES = (1, 2, 4)
KINDS = ("ddp", "fsdp")
N, ALPHA = 200_000, 1e-6

Ranks = list[tuple[dict[str, Tensor], dict[str, Any]]]
Results = Callable[[int, str], Ranks]


def start(folder: Path, size: int, *scenarios: str) -> list[subprocess.Popen[str]]:
    folder.joinpath("meet").unlink(missing_ok=True)
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), str(rank), str(size), *scenarios],
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def wait(ranks: list[subprocess.Popen[str]]) -> None:
    """Until all have ended well; if one fails or hangs, end the others and show what it said."""
    try:
        said = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(said)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the ranks of a world of the given size found; each world is started once, for all scenarios together."""
    scenarios = {
        1: ("sums", "noise", "geometry"),
        2: ("sums", "tied", "noise", "train", "round_trips", "geometry", "failures"),
        4: ("sums", "noise", "train"),
    }

    @functools.cache
    def world(size: int) -> Path:
        folder = tmp_path_factory.mktemp(f"world{size}")
        wait(start(folder, size, *scenarios[size]))
        return folder

    def read(size: int, scenario: str) -> Ranks:
        paths = [world(size) / f"{scenario}.{rank}" for rank in range(size)]
        return [(load_file(f"{p}.safetensors"), json.loads(Path(f"{p}.json").read_text())) for p in paths]

    return read


# ---- sums


@pytest.mark.nightly
@pytest.mark.parametrize("size", SIZES)
def test_the_clipped_sum_is_that_of_one_process(results: Results, size: int) -> None:
    """To 1e-9 in float64: rows, users, records that raise or are NaN, ranks without a single record, no record at all.

    37 rows over 4 ranks, and layers whose dimensions 2 and 4 do not divide, so that shards are uneven or empty.
    """
    alone = {k.removeprefix("plain."): t for k, t in results(1, "sums")[0][0].items() if k.startswith("plain.")}
    for rank, (found, _) in enumerate(results(size, "sums")):
        for kind in KINDS:
            for name, expected in alone.items():
                # Released: 1e-2 * 0.3 is the noise on both sides, and 7 standard deviations of a difference are enough.
                tolerance = 7 * math.sqrt(2) * 3e-3 if "released" in name else 1e-9
                difference = (found[f"{kind}.{name}"] - expected).abs().max()
                assert difference <= tolerance, (rank, kind, name)
        assert found["ddp.rows.0"].norm() > 1
        assert found["ddp.none.0"].norm() == 0
        assert found["ddp.bad.0"].norm() not in (0, found["ddp.rows.0"].norm())


@pytest.mark.nightly
def test_a_sharded_model_is_copied_as_it_is(results: Results) -> None:
    """Tied weights, an LSTM, modules in a list: sharded and not, the same sum to 1e-9."""
    for found, _ in results(2, "tied"):
        assert len(found) == 2 * 5
        for i in range(5):
            assert found[f"plain.{i}"].norm() > 0.01
            torch.testing.assert_close(found[f"plain.{i}"], found[f"fsdp.{i}"], rtol=0, atol=1e-9)


def test_ranks_have_seeds_of_their_own() -> None:
    seeds = [World(rank, 4).own_seed(5) for rank in range(4)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 4


class Noted(torch.utils.data.Dataset[Any]):
    """Rows that note when they are read."""

    def __init__(self, n: int) -> None:
        self.n, self.read = n, list[int]()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Tensor:
        self.read.append(i)
        return torch.ones(3) * i


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 11])
def test_shares_are_disjoint_and_complete(n: int, tmp_path: Path) -> None:
    """Rate 1, four ranks, any number of records: each is read by exactly one rank, once. No padding, no repeats."""
    plan = hs.PrivacyPlan(steps=4, sampling_rate=1.0, expected_batch_size=4, noise_multiplier=1.0)
    data, model = Noted(n), nn.Linear(3, 1)
    made = PrivateGradient(
        model, lambda m, x: m(x).square().squeeze(1), PrivateData(data, example=torch.ones(3)), plan,
        ledger=Ledger.open(tmp_path / "ledger.jsonl"), run_id="run",
    )  # fmt: skip
    for rank in range(4):
        made._batches._world = World(rank, 4)
        before = len(data.read)
        made._clipped_sum()
        assert all(i % 4 == rank for i in data.read[before:])
    assert sorted(data.read) == list(range(n))


# ---- noise


def variance_p(x: np.ndarray[Any, Any], sigma: float) -> float:
    """Two-sided chi-square p-value of the variance."""
    statistic = float((x**2).sum()) / sigma**2
    return float(2 * min(stats.chi2.cdf(statistic, len(x)), stats.chi2.sf(statistic, len(x))))


def streams(whole: Tensor, size: int) -> Iterator[np.ndarray[Any, Any]]:
    """The N numbers that each rank drew for a tensor, over `size` steps: its piece of each."""
    pieces = whole.reshape(size, size, -1)
    yield from (pieces[:, rank].reshape(-1).numpy() for rank in range(size))


def largest_correlation(rows: list[np.ndarray[Any, Any]]) -> float:
    r = np.corrcoef(np.stack(rows))
    return float(np.abs(r - np.eye(len(rows))).max())


@pytest.mark.nightly
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_noise_between_ranks_and_tensors(results: Results, kind: str, size: int) -> None:
    """n=200,000, alpha 1e-6 each: scale sigma accepted, 0.98 sigma rejected, |r| < 4.9/sqrt(n) between any two of
    ranks, tensors and steps. Every rank is given the same numbers, and a seed that all ranks share is seen."""
    limit = 4.9 / math.sqrt(N)
    ranks = [found for found, _ in results(size, "noise")]
    own = [ranks[0][f"{kind}.own.{i}"] for i in range(2)]
    for drawn in (stream for whole in own for stream in streams(whole, size)):
        assert len(drawn) == N
        assert variance_p(drawn, 1.0) > ALPHA
        assert variance_p(drawn, 0.98) < ALPHA
    assert largest_correlation([s for whole in own for s in streams(whole, size)]) < limit
    assert largest_correlation([step.reshape(-1).numpy() for whole in own for step in whole]) < limit
    if size > 1:
        assert largest_correlation(list(streams(ranks[0][f"{kind}.seeded.0"], size))) > 0.99


# ---- training


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_are_bit_equal_after_fifty_steps(results: Results, size: int) -> None:
    """Weights, test losses, histories and statements; and shards that are put together equal the replicated run."""
    first, about = results(size, "train")[0]
    for tensors, told in results(size, "train"):
        assert told == about
        assert all(torch.equal(t, first[name]) for name, t in tensors.items())
    for name in (n for n in first if n.startswith("ddp.")):
        torch.testing.assert_close(first[name], first[name.replace("ddp.", "fsdp.")], rtol=0, atol=1e-6)
    for run in about.values():
        assert run["updates"] == 50
        assert run["loss"] < 0.6 * math.log(4)
        assert run["statement"]["spent_so_far"]["steps"] == 50
    if size == 2:
        assert not torch.equal(first["ddp.None.0.weight"], first["ddp.uniform.0.weight"])


@pytest.mark.nightly
def test_a_geometry_is_that_of_one_process(results: Results) -> None:
    """To 1e-5 after four steps: replicas, shards, and new coordinates after two steps, with the average of each."""
    alone, _ = results(1, "geometry")[0]
    first, _ = results(2, "geometry")[0]
    for found, _ in results(2, "geometry"):
        assert all(torch.equal(t, first[name]) for name, t in found.items())
        assert sorted(found) == sorted(alone)
        for name, expected in alone.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-5)
            if name.startswith("replica."):
                torch.testing.assert_close(found[name.replace("replica", "sharded")], expected, rtol=1e-5, atol=1e-5)
    starts = {"replica": convolution(), "refresh": network("plain", torch.float32)}
    for name, start in starts.items():
        assert float((alone[f"{name}.0.weight"] - start.state_dict()["0.weight"]).norm()) > 0.1


@pytest.mark.nightly
def test_a_checkpoint_is_the_same_for_replicas_and_shards(results: Results) -> None:
    """Adam and momentum, averages included: every tensor of the file comes back bit by bit, whoever wrote it."""
    same = results(2, "round_trips")[0][1]
    assert len(same) == 8
    for name, (tensors, equal, kept) in same.items():
        assert (equal, kept) == (tensors, True), name
        assert tensors >= 20, name


@pytest.mark.nightly
def test_an_error_on_one_rank_is_raised_on_all(results: Results) -> None:
    """Each rank goes on from every one of these, and has the same type and message: none waits for another."""
    (_, seen), *others = results(2, "failures")
    assert all(told == seen for _, told in others)
    kinds = {name: kind for name, (kind, _) in seen.items()}
    assert kinds == {
        "refused": "BudgetExceeded",
        "stopped": "returned",
        "first": "returned",
        "changed": "ConfigError",
        "differs": "ConfigError",
        "corrupt": "CheckpointCorrupt",
        "one rank": "ConfigError",
        "memory": "MemoryError",
        "drift": "ConfigError",
        "sizes": "ConfigError",
        "order": "ConfigError",
        "arguments": "ConfigError",
        "callback": "ValueError",
        "dense": "ConfigError",
    }
    assert seen["stopped"][1] == "budget"
    assert "not enough memory" in seen["memory"][1]  # and not what the loss said of it
    assert "the parameters" in seen["drift"][1]
    assert "200" not in seen["sizes"][1], "the number of private records is not told"


@pytest.mark.nightly
def test_killed_and_resumed_as_another_kind_of_run(tmp_path: Path) -> None:
    """All ranks of a DDP run killed, then those of the FSDP2 run that went on with it; one process finishes it.

    The ledger counts at least every release and at most a block and one more a kill; no noise is used twice.
    """
    run, witness = tmp_path / "long", tmp_path / "witness"
    witness.touch()
    for sharded in (False, True):
        if sharded:
            (tmp_path / "sharded").touch()
        _kill(start(tmp_path, 2, "long"), witness, len(_lines(witness)) + 25)
        assert Ledger.open(run / "ledger.jsonl").counts()[0].count >= len(_lines(witness))
    made = long_trainer("plain", witness, writes=True)
    result = made.fit(
        rows(200, torch.float32), rows(40, torch.float32, seed=2), check_usable=False, run_dir=run, delta=1e-5
    )
    assert (result.stopped, result.updates) == ("finished", 300)
    releases, spent = _lines(witness), Ledger.open(run / "ledger.jsonl").counts()[0].count
    assert len(releases) <= spent <= len(releases) + 2 * (300 // 50 + 1)
    assert [int(releases[i].split()[0]) for i in (0, -1)] == [1, 300]
    assert len({line.split()[1] for line in releases}) == len(releases)
    assert verify(run)["finished"]


def _kill(ranks: list[subprocess.Popen[str]], witness: Path, updates: int) -> None:
    deadline = time.monotonic() + 120
    while len(_lines(witness)) < updates and all(rank.poll() is None for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    said = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL] * len(ranks), said


def _lines(witness: Path) -> list[str]:
    return [line for line in witness.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.nightly
def test_the_example_by_torchrun(tmp_path: Path) -> None:
    example = WORKER.parents[2] / "examples" / "distributed.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(example), "--shard", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["processes"] == 2
    assert told["accuracy"] > 0.8
    assert verify(tmp_path / "run")["finished"]


def shell(command: str, folder: Path) -> subprocess.Popen[str]:
    """A command of the page, with this Python's torchrun."""
    torchrun = f'torchrun() {{ "{sys.executable}" -m torch.distributed.run "$@"; }}\n'
    script = ["bash", "-ec", torchrun + command]
    return subprocess.Popen(
        script, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


def ended(process: subprocess.Popen[str]) -> list[str]:
    """The lines that it printed, once it has ended well."""
    try:
        printed, said = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, said
    return printed.splitlines()


@pytest.mark.nightly
def test_the_page_on_one_machine_and_on_two(tmp_path: Path) -> None:
    """Two agents of torchrun with folders of their own, on loopback, and the second one writes no run."""
    page = ROOT / "docs" / "processes.md"
    (start_here,) = (block.text for block in blocks(page, "bash"))
    alone, *machines = (tmp_path / name for name in ("alone", "machine0", "machine1"))
    for folder in (alone, *machines):
        folder.mkdir()
    (printed,) = ended(shell(start_here, alone))
    assert printed.startswith("public images alone:")
    assert verify(alone / "runs" / "digits")["finished"]
    script = start_here.partition("torchrun")[0]
    (text,) = (block.text for block in blocks(page, "text") if "--node-rank" in block.text)
    text = text.replace("10.0.0.1", "127.0.0.1").replace("29500", str(free_port()))
    commands = [line.partition(": ")[2] for line in text.splitlines()]
    agents = [shell(script + command, folder) for command, folder in zip(commands, machines, strict=True)]
    first, second = (ended(agent) for agent in agents)
    assert (len(first), second) == (1, [])
    assert verify(machines[0] / "runs" / "digits")["finished"]
    assert [path.name for path in machines[1].iterdir()] == ["train.py"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
