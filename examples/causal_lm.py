"""A language model of what people write on Stack Exchange: a small GPT-2, LoRA, and the account as the unit of privacy.

    python examples/causal_lm.py start --data DIR --out OUT
    python examples/causal_lm.py train --data DIR --out OUT --arm lora --epsilon 2

DIR holds stackexchange/users.jsonl, brown/brown.tokens and wikipedia-extra/wiki.tokens. `start` learns a tokenizer of
byte pairs and trains a GPT-2 from random weights on the Brown corpus and Wikipedia, then on the public accounts. All of
that is public. `train` adds LoRA, trains it on the private accounts, and writes OUT/ARM-epsE.json. Run again, both
commands resume or do nothing.

A row is an account with the first 64 tokens that it wrote, so the guarantee is for the account and not for a post.
Test, public, held-out and private accounts are told apart by a hash of the name. The loss is per token, the mean over
an account's tokens and then over the test accounts. Perplexity is its exponential.

Arms:
    public      The start. No private row is read.
    lora        `PrivateTrainer` with AdamW, learning rate and clip norm as written below.
    frozen      The same with the factors A frozen.
    advised     `frozen` with batch, clip norm, optimizer, rate and geometry by `hs.advise`, from public accounts.
    nonprivate  `lora` by the `Trainer` of transformers, without clipping and noise.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import halfsilver as hs
from halfsilver.huggingface import Privacy, PrivateTrainer, causal_loss
from halfsilver.runs.folder import versions, write_json
from halfsilver.tasks.sentences import sentences, untokenised

PARTS = {"test": 15, "public": 8, "held_out": 2, "private": 75}  # per cent of the accounts
BLOCK, TOKENS, PIECES, END = 128, 64, 4096, "<|endoftext|>"
SIZE: Any = {"n_embd": 128, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DELTA, BATCH, EPOCHS, CLIP, RATE = 1e-5, 512, 4, 1.0, 1e-2
ARMS = ("public", "lora", "frozen", "advised", "nonprivate")

Rows = dict[str, datasets.Dataset]


# Text


def cleaned(text: str) -> str:
    """Prose in lower case with a space before each word, as all texts are given to the tokenizer."""
    return "".join(f" {word}" for sentence in sentences(text) for word in sentence)


def accounts(data: Path) -> dict[str, list[str]]:
    """What each account of a part wrote, in the order of the file."""
    written: dict[str, list[str]] = {}
    with (data / "stackexchange" / "users.jsonl").open(encoding="utf-8") as lines:
        for post in map(json.loads, lines):
            written.setdefault(post["user"], []).append(f"{post.get('title') or ''}\n{post['text']}")
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    for user, posts in written.items():
        parts[part_of(user)].append(END.join(map(cleaned, posts)))
    return parts


def part_of(user: str) -> str:
    """By a hash of the name, so that nobody is in two parts and no other account matters."""
    place = int.from_bytes(sha256(user.encode()).digest()[:4], "big") % 100
    return next(part for part, end in zip(PARTS, accumulate(PARTS.values()), strict=True) if place < end)


def articles(data: Path) -> Iterator[str]:
    """Lines of the public corpora."""
    for name in ("brown/brown.tokens", "wikipedia-extra/wiki.tokens"):
        for line in (data / name).read_text(encoding="utf-8").splitlines():
            yield cleaned(untokenised(line.split()))


def learn_tokenizer(texts: Iterable[str]) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=PIECES, special_tokens=[END], initial_alphabet=alphabet, show_progress=False))  # fmt: skip
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END, model_max_length=BLOCK
    )


def rows_of(texts: Sequence[str], tokenizer: Any, length: int = TOKENS) -> datasets.Dataset:
    """One row per account. Padding is not attended to, and the labels of padding do not count."""
    made = tokenizer([END + text for text in texts], padding="max_length", truncation=True, max_length=length)
    labels = [
        [token if seen else -100 for token, seen in zip(row, mask, strict=True)]
        for row, mask in zip(made["input_ids"], made["attention_mask"], strict=True)
    ]
    columns = {name: made[name] for name in ("input_ids", "attention_mask")}
    return datasets.Dataset.from_dict({**columns, "labels": labels})


def blocks_of(texts: Iterable[str], tokenizer: Any) -> datasets.Dataset:
    """The texts one after the other, cut into blocks, as language models are pretrained."""
    ids = chain.from_iterable(tokenizer(list(texts), verbose=False)["input_ids"])
    blocks = []
    while len(block := list(islice(ids, BLOCK))) == BLOCK:
        blocks.append(block)
    return datasets.Dataset.from_dict({"input_ids": blocks, "labels": blocks})


# The public start


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        str(folder), report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=False, logging_steps=100, **options
    )


def start(data: Path, out: Path) -> None:
    if (out / "start" / "config.json").exists():
        return
    parts, corpus = accounts(data), list(articles(data))
    tokenizer = learn_tokenizer(chain(corpus, parts["public"]))
    tokenizer.save_pretrained(str(out / "start"))
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=BLOCK, bos_token_id=0, eos_token_id=0, pad_token_id=0, **SIZE
    )
    model = transformers.GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    begun = time.time()
    for name, rows, options in (
        ("corpus", blocks_of(corpus, tokenizer), {"num_train_epochs": 2, "learning_rate": 2e-3}),
        ("accounts", rows_of(parts["public"], tokenizer, BLOCK), {"num_train_epochs": 3, "learning_rate": 5e-4}),
    ):
        args = arguments(out / "start" / name, per_device_train_batch_size=32, weight_decay=0.01,
                         lr_scheduler_type="cosine", warmup_steps=50, **options)  # fmt: skip
        transformers.Trainer(model, args, train_dataset=rows).train()
        print(f"{name}: {len(rows)} rows, {time.time() - begun:.0f} s in all", flush=True)
    model.save_pretrained(str(out / "start"))


def loaded(kind: Any, out: Path) -> Any:
    """Model or tokenizer of the start, from its files; nothing is fetched, so there is no revision to pin."""
    return kind.from_pretrained(str(out / "start"), local_files_only=True)


# The private rows


def adapted(out: Path, *, frozen: bool) -> Any:
    """The start with adapters in all its layers. Factors A begin at random and B at 0, as PEFT makes them."""
    torch.manual_seed(0)
    model = loaded(transformers.GPT2LMHeadModel, out)
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, fan_in_fan_out=True,
                      target_modules=["c_attn", "c_proj", "c_fc"])  # fmt: skip
    made = get_peft_model(model, lora)
    if frozen:
        for name, parameter in made.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad_(False)
    return made


def train(rows: Rows, out: Path, arm: str, epsilon: float) -> dict[str, Any]:
    """What the arm reached on the test accounts."""
    model = adapted(out, frozen=arm in ("frozen", "advised"))
    folder = out / f"{arm}-eps{epsilon:g}"
    more: dict[str, Any] = {}
    options: Any = {
        "num_train_epochs": EPOCHS,
        "learning_rate": RATE,
        "lr_scheduler_type": "linear",
        "max_grad_norm": CLIP,
    }
    if arm == "nonprivate":
        args = arguments(folder, per_device_train_batch_size=32, **options)
        transformers.Trainer(model, args, train_dataset=rows["private"]).train()
    elif arm == "advised":
        more = advised(rows, model, folder, epsilon)
    elif arm != "public":
        args = arguments(folder, per_device_train_batch_size=BATCH, **options)
        privacy = Privacy(epsilon=epsilon, delta=DELTA, population=len(rows["private"]))
        trainer = PrivateTrainer(model, args, train_dataset=rows["private"], public_dataset=rows["public"],
                                 privacy=privacy)  # fmt: skip
        more = {"spent": trainer.train().epsilon(), "plan": trainer.plan.to_dict()}
    learns = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"arm": arm, "epsilon": epsilon, "loss": mean_loss(model, rows["test"]), "parameters": learns, **more}


def advised(rows: Rows, model: Any, folder: Path, epsilon: float) -> dict[str, Any]:
    tables = {part: table.with_format("torch")[:] for part, table in rows.items()}
    public, held_out, private = (tables[part] for part in ("public", "held_out", "private"))
    advice = hs.advise(model, causal_loss, public, held_out, population=len(rows["private"]), epsilon=epsilon,
                       delta=DELTA, epochs=EPOCHS, tell=partial(print, flush=True))  # fmt: skip
    print(advice, flush=True)
    found = advice.trainer(model, causal_loss).fit(private, public, run_dir=folder)
    return {"spent": found.epsilon(), "plan": advice.plan.to_dict(), "advice": str(advice)}


@torch.no_grad()
def mean_loss(model: Any, rows: datasets.Dataset) -> float:
    table = rows.with_format("torch")
    losses = [causal_loss(model.eval(), table[i : i + 64]) for i in range(0, len(table), 64)]
    return float(torch.cat(losses).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("start", "train"))
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arm", choices=ARMS, default="lora")
    parser.add_argument("--epsilon", type=float, default=2.0)
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data, or set HALFSILVER_DATA")
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{args.arm}-eps{args.epsilon:g}.json"
    if args.what == "start":
        start(Path(args.data), out)
    elif not file.exists():
        tokenizer = loaded(transformers.PreTrainedTokenizerFast, out)
        rows = {part: rows_of(texts, tokenizer) for part, texts in accounts(Path(args.data)).items()}
        begun = time.process_time()
        found = train(rows, out, args.arm, args.epsilon)
        sizes = {part: len(table) for part, table in rows.items()}
        settings = {"batch": BATCH, "epochs": EPOCHS, "max_grad_norm": CLIP, "learning_rate": RATE, "delta": DELTA}
        write_json(file, {**found, "accounts": sizes, "settings": settings, "versions": versions(),
                          "seconds": round(time.process_time() - begun)})  # fmt: skip
        print(f"{args.arm} at epsilon {args.epsilon:g}: loss {found['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
