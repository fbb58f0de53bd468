"""WikiText-2: the next word of an article, with the paper's LSTM; a record is a sequence of words.

Each line is cut into pieces of 35 words, each word with the one after it as target; what is left of a line is dropped.
That gives 48,764 training sequences, the paper's 48.8k. The last target of a piece is the first word of the next, so
two neighbouring records share that one word. `perplexity` is the exponential of the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfsilver._core.tensors import Batch
from halfsilver.errors import DataMissing, require
from halfsilver.study.problem import Problem
from halfsilver.tasks import files
from halfsilver.tasks.networks import LanguageModel
from halfsilver.tasks.split import VALIDATION_ROWS, Split, public_share

WORDS, LENGTH = 8_000, 35
UNKNOWN = "<unk>"
PAPER_VOCAB = "paper_vocab: the vocabulary was counted on private text"

Piece = list[str]  # LENGTH + 1 words
PublicSource = Literal["split", "ood", "both"]
_PUBLIC_TEXT: dict[str, str] = {
    "split": "the public part of the split",
    "ood": "other Wikipedia articles and the Brown corpus",
    "both": "other Wikipedia articles, the Brown corpus, and the public part of the split",
}


def problem(
    data: Path,
    *,
    seed: int = 0,
    public: int | None = None,
    validation: int = VALIDATION_ROWS,
    paper_vocab: bool = False,
    public_source: PublicSource = "split",
) -> Problem:
    """The task from the files under `data`/wikitext-2; 4 % of the sequences are public unless `public` says so.

    The vocabulary is that of the public text, or with ``paper_vocab=True`` of all training text, as in the paper; that
    looks at private words, is outside the guarantee, and is stamped. With ``public_source="ood"`` the public text is
    other Wikipedia articles and the Brown corpus, and every training sequence that is not set aside is private. With
    ``public_source="both"`` that text comes before the public part of the split.
    """
    require(public_source in _PUBLIC_TEXT, "public_source", public_source, f"in {tuple(_PUBLIC_TEXT)}")
    other = public_source == "ood"
    require(not (other and public), "public", public, "None with public_source='ood', which has its own public text")
    train = _read(data, "wikitext-2/wiki.train.tokens", files.WIKITEXT)
    share = public_share(len(train)) if public is None else public
    split = Split(seed=seed, public=0 if other else share, validation=validation)
    parts = split.parts(len(train))
    known = [*([] if public_source == "split" else _other_text(data)), *_chosen(train, parts.public)]
    ids = vocabulary(train if paper_vocab else known)
    test = encode(_read(data, "wikitext-2/wiki.test.tokens", files.WIKITEXT), ids)
    about = {"vocabulary_words": len(ids), "public_rows": len(known), "test_rows": len(test[0])}
    return Problem(
        make_model=make_model,
        loss_fn=loss_fn,
        private=encode(_chosen(train, parts.private), ids),
        public=encode(known, ids),
        validation=encode(_chosen(train, parts.validation), ids) if validation else None,
        test=test,
        population=len(parts.private),
        about={**_about(paper_vocab, public_source), **about, "split": split.about(len(train))},
    )


def pieces(lines: Iterable[Sequence[str]]) -> list[Piece]:
    """Pieces of 35 words and the word after them, line by line."""
    return [list(line[i : i + LENGTH + 1]) for line in lines for i in range(0, len(line) - LENGTH, LENGTH)]


def vocabulary(text: Iterable[Sequence[str]]) -> dict[str, int]:
    """Numbers of "<unk>" and of the most frequent other words of `text`, at most 8,000 in all.

    A word that ends a piece and starts the next is counted once. Ties go by the alphabet, not by the order of the text.
    """
    counts = Counter(word for piece in text for word in piece[:LENGTH])
    counts.pop(UNKNOWN, None)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: i for i, word in enumerate([UNKNOWN, *ranked[: WORDS - 1]])}


def encode(text: Sequence[Piece], ids: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [N, 35] each."""
    unknown = ids[UNKNOWN]
    numbers = np.array([[ids.get(word, unknown) for word in piece] for piece in text], dtype=np.int64)
    both = torch.from_numpy(numbers.reshape(-1, LENGTH + 1))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def make_model() -> nn.Module:
    """The network with fresh weights from torch's global generator."""
    return LanguageModel(WORDS, 120, 120, 2)


def loss_fn(model: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy over the words of each sequence."""
    words, targets = batch
    losses = functional.cross_entropy(model(words).flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)


def _chosen(text: Sequence[Piece], index: Tensor) -> list[Piece]:
    return [text[i] for i in index.tolist()]


def _read(data: Path, name: str, source: files.Source) -> list[Piece]:
    found = pieces(files.tokens(data, name, source))
    if not found:
        raise DataMissing(
            f"The file {name} in {data} has no line of more than {LENGTH} words; it is not {source.name}."
        )
    return found


def _other_text(data: Path) -> list[Piece]:
    wikipedia = _read(data, "wikipedia-extra/wiki.tokens", files.WIKIPEDIA)
    return [*wikipedia, *_read(data, "brown/brown.tokens", files.BROWN)]


def _about(paper_vocab: bool, public_source: PublicSource) -> dict[str, Any]:
    return {
        "data": "WikiText-2",
        "sequences": "35 words of a line, each with the next word as target; the rest of a line is dropped",
        "public_text": _PUBLIC_TEXT[public_source],
        "vocabulary": "counted on all training text" if paper_vocab else "counted on public text",
        "stamps": [PAPER_VOCAB] if paper_vocab else [],
    }
