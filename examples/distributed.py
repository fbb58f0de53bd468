"""Private training on several processes, with scikit-learn's digits as a stand-in for private images.

    torchrun --nproc-per-node 2 examples/distributed.py            the same weights on every process
    torchrun --nproc-per-node 2 examples/distributed.py --shard    sharded by FSDP2's fully_shard

Every process is given all the data and computes on its own share of it; process 0 writes the run folder. On GPUs, use
"nccl" for "gloo", and move the model to the process's own device before `fully_shard`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import halfsilver as hs


def losses(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir(), "halfsilver-digits"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    x = x.float() / 16
    private, public, test = ((x[rows], y[rows]) for rows in (slice(300, 1500), slice(0, 300), slice(1500, None)))

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if args.shard:
        fully_shard(model)
    trainer = hs.Trainer(
        model,
        losses,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        plan=hs.PrivacyPlan(steps=60, sampling_rate=0.2, expected_batch_size=240, noise_multiplier=4.0),
        mirror=hs.FirstOrder(hs.cosine(end=0.3)),
        metrics={"accuracy": lambda m, b: (m(b[0]).argmax(1) == b[1]).float()},
    )
    result = trainer.fit(private, public, run_dir=args.out, delta=1e-4, test=test)
    if dist.get_rank() == 0:
        told = {"processes": dist.get_world_size(), "epsilon": result.epsilon(1e-4), **result.history[-1]}
        print(json.dumps(told))
    # Caches of sharded tensors keep gloo's threads alive beyond the next line, and Python aborts where one of these
    # still has a tensor to let go of when it ends. PyTorch offers nothing to wait for but time.
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
