"""What `halfsilver overlap` and the guard in training find on the real data sets, and what they cost.

    python -m benchmarks.robustness.overlap --json

CIFAR-10: the split of the benchmark, 2,000 public images and 48,000 private ones, among which `--planted` copies of
public images each are put unchanged, moved by a pixel, and with another brightness. Alarms at other private images are
counted as false, although some of these are real: the published training set has near copies of its own.
WikiText: the training text of WikiText-2 against the first articles of WikiText-103, where more words are spelt out,
and a clean pair, WikiText-2 against the Brown corpus. Seconds are of one core (process time) and on the clock.
The guard: its share of a private step of the EMNIST network, on made-up rows of bytes, batch 500.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfsilver.overlap import Overlap, overlap_of_files, overlap_of_images, overlap_of_lines
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.tasks import emnist, files
from halfsilver.tasks.images import image_loss
from halfsilver.tasks.split import Split

Pixels = NDArray[np.uint8]
_PUBLIC = 2_000


def planted_images(data: Path, *, private: int = 48_000, planted: int = 100) -> dict[str, Any]:
    """Share of the planted images that is found, each by its own original, and of others that are reported."""
    images = files.cifar10(data, "train")[0].contiguous().numpy()
    parts = Split(seed=0, public=_PUBLIC, validation=0).parts(len(images))
    shown, own = images[parts.public.numpy()], images[parts.private.numpy()[:private]]
    kinds = {"exact": shown[:planted], "shifted": _shifted(shown[planted : 2 * planted])}
    kinds["brightness"] = _brightened(shown[2 * planted : 3 * planted])
    found, cost = _timed(lambda: overlap_of_images(np.concatenate([*kinds.values(), own]), shown))
    figures: dict[str, Any] = {"private": len(own), "public": len(shown), "planted": planted}
    for k, kind in enumerate(kinds):
        places = range(k * planted, (k + 1) * planted)
        hits = [found.private.matches.get(i) for i in places]
        figures[f"{kind}_found"] = (
            sum(m is not None and m.record == i for i, m in zip(places, hits, strict=True)) / planted
        )
    others = sum(i >= 3 * planted for i in found.private.matches)
    return {**figures, "false_alarms": others / len(own), **cost}


def _shifted(images: Pixels) -> Pixels:
    """Each by one pixel, in one of eight directions; at the edge the last pixels are repeated."""
    ways = [(y, x) for y in range(3) for x in range(3) if (y, x) != (1, 1)]
    wide = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
    moved = [wide[i, :, y : y + 32, x : x + 32] for i, (y, x) in enumerate(ways[i % 8] for i in range(len(images)))]
    return np.stack(moved)


def _brightened(images: Pixels) -> Pixels:
    """By 30 levels up or down, or by a factor of 1.3 or 0.7, in turn."""
    wide = images.astype(np.float64)
    changed = [(wide + 30, wide - 30, wide * 1.3, wide * 0.7)[i % 4][i] for i in range(len(images))]
    levels: Pixels = np.clip(np.stack(changed), 0, 255).astype(np.uint8)
    return levels


def gapped_text(data: Path, *, lines: int, gaps: float = 0.03) -> dict[str, Any]:
    """WikiText-2 against itself with 3 % of the words unknown, and against the Brown corpus."""
    text = files.tokens(data, "wikitext-2/wiki.train.tokens", files.WIKITEXT)[:lines]
    rng = np.random.default_rng(0)
    gapped = [[word if rng.random() > gaps else "<unk>" for word in line] for line in text]
    other = overlap_of_lines(text, files.tokens(data, "brown/brown.tokens", files.BROWN)[:lines])
    return {
        "near_found": overlap_of_lines(text, gapped).figures()["private"]["share"],
        "false_alarms": other.figures()["private"]["share"],
    }


def wikitext(data: Path) -> dict[str, Any]:
    """WikiText-2, two million words, against the first articles of WikiText-103 and against the Brown corpus."""
    private, public = data / "wikitext-2/wiki.train.tokens", data / "wikitext-103-prefix/wiki.train.tokens"
    found, cost = _timed(lambda: overlap_of_files(private, public))
    clean = overlap_of_files(private, data / "brown/brown.tokens")
    words = [sum(map(len, files.lines_of_words(path))) for path in (private, public)]
    shares = {
        "share_of_private": found.figures()["private"]["share"],
        "share_of_public": found.figures()["public"]["share"],
    }
    clean_share = clean.figures()["private"]["share"]
    return {"words": sum(words), "private_words": words[0], **shares, "clean_share": clean_share, **cost}


def guard_cost(steps: int = 15, batch: int = 500) -> dict[str, float]:
    """CPU seconds of a private step and of the guard within it: medians, of one thread."""
    torch.set_num_threads(1)
    images = torch.randint(0, 256, (100 * batch, 1, 28, 28), dtype=torch.uint8)
    rows = images.contiguous(memory_format=torch.channels_last), torch.randint(0, 47, (100 * batch,))
    public = torch.randint(0, 256, (28_000, 1, 28, 28), dtype=torch.uint8), torch.randint(0, 47, (28_000,))
    plan = PrivacyPlan(steps=steps, sampling_rate=0.01, expected_batch_size=batch, noise_multiplier=1.0)
    with tempfile.TemporaryDirectory() as folder:
        source = PrivateGradient(
            emnist.make_model(),
            image_loss(emnist.scale),
            PrivateData(rows),
            plan,
            ledger=Ledger.open(Path(folder) / "ledger.jsonl"),
            run_id="run",
            public_rows=[public],
        )
        guard, spent = source._batches._copies.left_out_of, [0.0]

        def timed(batch: Any) -> Any:
            started = time.process_time()
            left = guard(batch)
            spent[-1] += time.process_time() - started
            return left

        source._batches._copies.left_out_of = timed  # type: ignore[method-assign]
        whole = []
        for _ in range(steps):
            started = time.process_time()
            source.release()
            whole.append(time.process_time() - started)
            spent.append(0.0)
    step, own = float(np.median(whole)), float(np.median(spent[:-1]))
    return {"step_ms": 1e3 * step, "guard_ms": 1e3 * own, "share": own / step}


def _timed(make: Callable[[], Overlap]) -> tuple[Overlap, dict[str, float]]:
    wall, cpu = time.perf_counter(), time.process_time()
    found = make()
    return found, {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"), help="folder of the data sets")
    parser.add_argument("--planted", type=int, default=100, help="images of each kind")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.data is None:
        parser.error("where are the data sets? give --data DIR, or set HALFSILVER_DATA")
    figures = {
        "images": planted_images(args.data, planted=args.planted),
        "text": wikitext(args.data),
        "guard": guard_cost(),
    }
    if args.json:
        print(json.dumps(figures))
        return
    for part, values in figures.items():
        print(part)
        for name, value in values.items():
            print(f"  {name:18} {value:.6g}")


if __name__ == "__main__":
    main()
