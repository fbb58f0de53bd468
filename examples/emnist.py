"""Four ways to use 4 % public data on EMNIST ByMerge, at one epsilon:

    public   train on the public images only
    cold     DP-SGD on the private images from a random start
    warm     DP-SGD from the public model
    pda      the same with the public loss as mirror map

    python examples/emnist.py --data DIR            2 epochs, about 10 minutes on 2 cores
    python examples/emnist.py --data DIR --quick    a tenth of the data and 20 steps

DIR holds EMNIST/raw/emnist-bymerge-*.gz as NIST publishes them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import halfsilver as hs

EPSILON, DELTA, BATCH, EPOCHS = 3.0, 1e-6, 500, 2


def read_idx(path: Path) -> Tensor:
    """One idx file: magic, sizes as big-endian int32, then bytes."""
    data = gzip.decompress(path.read_bytes())
    dims = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3])]
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * len(dims)).reshape(dims).copy())


def load(folder: Path, split: str, rows: int) -> tuple[Tensor, Tensor]:
    prefix = folder / "EMNIST" / "raw" / f"emnist-bymerge-{split}"
    images = read_idx(Path(f"{prefix}-images-idx3-ubyte.gz"))[:rows]
    labels = read_idx(Path(f"{prefix}-labels-idx1-ubyte.gz"))[:rows]
    return images.transpose(1, 2)[:, None].float() / 255, labels.long()


def network() -> nn.Module:
    """The paper's network for EMNIST."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 6 * 6, 32), nn.ReLU(), nn.Linear(32, 47),
    )  # fmt: skip


def loss_fn(model: Any, batch: Any) -> Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels, reduction="none")


def accuracy(model: Any, batch: Any) -> Tensor:
    return torch.eq(model(batch[0]).argmax(1), batch[1]).double()


def run(method: str, plan: hs.PrivacyPlan, private: Any, public: Any, test: Any, run_dir: Path) -> dict[str, Any]:
    model = network()
    trainer = hs.Trainer(
        model,
        loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=2.0 if method == "cold" else 1.0),
        plan=plan,
        mirror=hs.FirstOrder(hs.cosine(end=0.9)) if method == "pda" else hs.Euclidean(),
        public_batch_size=BATCH // 4,
        metrics={"accuracy": accuracy},
    )
    if method != "cold":
        trainer.pretrain(public, epochs=30, patience=3)
    if method == "public":
        return {"method": method, "epsilon": 0.0, **trainer.evaluate(test)}
    result = trainer.fit(private, public, run_dir=run_dir, delta=DELTA, test=test)
    last = result.history[-1]
    return {
        "method": method,
        "epsilon": result.epsilon(DELTA),
        "loss": last["loss"],
        "accuracy": last["accuracy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"), required=False)
    parser.add_argument("--out", type=Path, default=None, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data, or set HALFSILVER_DATA")
    n, tests = (10_000, 2_000) if args.quick else (99_845, 20_000)
    images, labels = load(args.data, "train", n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    public, private = ((images[i], labels[i]) for i in torch.split(order, [n // 25, n - n // 25]))
    population = n - n // 25  # declared: that EMNIST has so many images is public
    plan = hs.PrivacyPlan.calibrate(
        epsilon=EPSILON,
        delta=DELTA,
        steps=20 if args.quick else EPOCHS * population // BATCH,
        sampling_rate=BATCH / population,
        expected_batch_size=BATCH,
    )
    out = args.out or Path(tempfile.mkdtemp(prefix="halfsilver-emnist-"))
    test = load(args.data, "test", tests)
    rows = [run(m, plan, private, public, test, out / m) for m in ("public", "cold", "warm", "pda")]
    if args.json:
        print(json.dumps({"quick": args.quick, "steps": plan.steps, "rows": rows}))
        return
    for row in rows:
        print(
            f"{row['method']:8} epsilon {row['epsilon']:5.2f}  loss {row['loss']:.4f}  accuracy {row['accuracy']:.3f}"
        )


if __name__ == "__main__":
    main()
