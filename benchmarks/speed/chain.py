"""What correlated noise costs against independent noise, for the noise of one step alone.

    python -m benchmarks.speed.chain --reps 7 --json

Both draw the same number of normals, in one thread, and take turns; ratios of processor time within a repetition.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque

import torch

from halfsilver.privacy.entropy import OsEntropy, normal_blocks
from halfsilver.privacy.noise_chain import NoiseChain
from halfsilver.privacy.strategies import Buffered

NUMBERS, SCALE = 4_000_000, 1e9
STRATEGY = Buffered((0.999, 0.97, 0.8, 0.3), (0.05, 0.1, 0.1, 0.2))


def seconds(chain: NoiseChain | None) -> float:
    started = time.process_time()
    blocks = ((start, noise.round_()) for start, noise in normal_blocks(OsEntropy(), NUMBERS, SCALE))
    deque((noise if chain is None else chain.follow(noise, start) for start, noise in blocks), maxlen=0)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chain = NoiseChain(STRATEGY, NUMBERS, rounds=2000, scale=SCALE)
    seconds(chain)
    ratios = []
    for _ in range(args.reps):
        plain = seconds(None)
        ratios.append(seconds(chain) / plain)
    found = {"buffers": 4, "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    print(json.dumps(found) if args.json else "\n".join(f"{k:8} {v:.3g}" for k, v in found.items()))


if __name__ == "__main__":
    main()
