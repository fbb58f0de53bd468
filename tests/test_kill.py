"""A training run killed at random moments: the ledger never counts too little, and no noise is used twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halfsilver.privacy.ledger import Ledger
from halfsilver.verify import verify

# Trains on 400 rows; after each update a line with the released norm goes to a file of its own, which, unlike the
# process, survives the kill.
SCRIPT = """
import sys, torch, halfsilver as hs
torch.set_num_threads(1)
torch.manual_seed(0)
folder, witness = sys.argv[1:]
x = torch.randn(400, 6)
model = torch.nn.Linear(6, 1)
plan = hs.PrivacyPlan(steps=600, spare_steps=10_000, sampling_rate=0.05, expected_batch_size=20, noise_multiplier=2.0)
log = open(witness, "a", buffering=1)
trainer = hs.Trainer(
    model, lambda m, b: m(b).square().squeeze(1), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), plan=plan,
    callbacks=[lambda r: log.write(f"{r.step} {r.released_norm!r}\\n")], checkpoint_seconds=0.02,
    speed=hs.Speed(backend="vmap"),
)
result = trainer.fit(x, run_dir=folder, delta=1e-5)
print(result.stopped, result.updates)
"""

KILLS = 20
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    """20 SIGKILLs at random moments of one run: 0 under-counted, 0 noise reused, over-count <= a block a kill."""
    run, witness, rng = tmp_path / "run", tmp_path / "witness", random.Random(0)
    witness.touch()
    command = [sys.executable, "-c", SCRIPT, str(run), str(witness)]
    for _ in range(KILLS):
        before = len(witness.read_text().splitlines())
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ONE_THREAD)
        wait_for_progress(process, witness, before)
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert Ledger.open(run / "ledger.jsonl").counts()[0].count >= len(complete(witness))
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ONE_THREAD)
    releases, spent = complete(witness), Ledger.open(run / "ledger.jsonl").counts()[0].count
    block = 600 // 50
    assert done.stdout.split() == ["finished", "600"]
    # A kill can also fall between a release and its line in the witness file: one more.
    assert len(releases) <= spent <= len(releases) + KILLS * (block + 1)
    norms = [line.split()[1] for line in releases]
    assert len(set(norms)) == len(norms)
    assert verify(run)["finished"]


def wait_for_progress(process: subprocess.Popen[bytes], witness: Path, before: int) -> None:
    """Until the process has made its first updates: start-up takes seconds, and kills there show little."""
    deadline = time.monotonic() + 120
    while len(witness.read_text().splitlines()) <= before and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def complete(witness: Path) -> list[str]:
    return [line for line in witness.read_text().splitlines(keepends=True) if line.endswith("\n")]
