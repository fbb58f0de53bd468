"""Writes the files of the example: one for each node with its users' rows, and two for the server.

python examples/flower_app/split.py DIR --nodes 4
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits

ROWS_EACH = 10  # of a user
PUBLIC, TEST = 60, 337  # rows of the server; 1,400 are left, which makes 140 users


def split(folder: Path, nodes: int) -> int:
    """The number of users of each node."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    users = (len(y) - PUBLIC - TEST) // ROWS_EACH // nodes
    parts = {"public": slice(0, PUBLIC), "test": slice(PUBLIC, PUBLIC + TEST)}
    for i in range(nodes):
        first = PUBLIC + TEST + i * users * ROWS_EACH
        parts[f"node{i + 1}"] = slice(first, first + users * ROWS_EACH)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        user = torch.arange(rows.stop - rows.start) // ROWS_EACH
        save_file({"x": x[rows].contiguous(), "y": y[rows], "user": user}, folder / f"{name}.safetensors")
    return users


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=4)
    args = parser.parse_args()
    print(f"{split(args.folder, args.nodes)} users on each of {args.nodes} nodes")
