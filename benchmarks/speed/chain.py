"""What correlated noise costs against independent noise, in one step.

    python -m benchmarks.speed.chain --reps 9 --json

Two ratios of processor time, in one thread, where both sides take turns: of the noise alone, and of a whole release,
which also rounds the sum to the grid, adds and divides. Medians, and the least and the largest over repetitions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque

import torch

from halfsilver.privacy.entropy import OsEntropy, normal_blocks
from halfsilver.privacy.gradients.base import ClippedSum
from halfsilver.privacy.noise import noisy_mean
from halfsilver.privacy.noise_chain import NoiseChain
from halfsilver.privacy.strategies import Buffered

NUMBERS, SCALE = 4_000_000, 4e9
STRATEGY = Buffered((0.999, 0.97, 0.8, 0.3), (0.05, 0.1, 0.1, 0.2))


def noise_seconds(chain: NoiseChain | None) -> float:
    started = time.process_time()
    blocks = ((start, noise.round_()) for start, noise in normal_blocks(OsEntropy(), NUMBERS, SCALE))
    deque((noise if chain is None else chain.follow(noise, start) for start, noise in blocks), maxlen=0)
    return time.process_time() - started


def release_seconds(chain: NoiseChain | None) -> float:
    total = ClippedSum([torch.ones(NUMBERS)], 1.0)
    started = time.process_time()
    noisy_mean(total, 1.0, OsEntropy(), expected=100.0, dtypes=[torch.float32], chain=chain)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chain = NoiseChain(STRATEGY, NUMBERS, rounds=2000, scale=SCALE)
    found: dict[str, dict[str, float]] = {}
    for name, seconds in (("noise", noise_seconds), ("release", release_seconds)):
        seconds(chain)
        ratios = []
        for _ in range(args.reps):
            plain = seconds(None)
            ratios.append(seconds(chain) / plain)
        found[name] = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    shown = (f"{name:8} {v['ratio']:.3g} ({v['least']:.3g} to {v['most']:.3g})" for name, v in found.items())
    print(json.dumps({"buffers": 4, **found}) if args.json else "\n".join(shown))


if __name__ == "__main__":
    main()
