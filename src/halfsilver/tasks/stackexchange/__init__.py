"""Stack Exchange: the next word in what people write on 20 sites; the unit of privacy is a user.

A user is an account on a site together with its meta site. An account's first 256 sentences, by time, are its rows.

Rows of the test and validation sets carry two weights, with which the mean over rows that a study takes is the mean
over *words* of that set: ``exp(loss)`` is then the perplexity, and "accuracy" is that on targets in the vocabulary.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfsilver._core.tensors import Batch, take_rows
from halfsilver.mirror.users import pooled
from halfsilver.study.problem import Problem
from halfsilver.tasks.networks import LanguageModel
from halfsilver.tasks.sentences import PAD, SPECIAL, Rows
from halfsilver.tasks.split import permutation
from halfsilver.tasks.stackexchange.data import Options, Parts, parts

CURVE_ROWS = 2_000
WIDTH = 96  # of the embedding, and of the layer before the words

WeightedRows = tuple[Tensor, Tensor, Tensor]


def problem(
    data: Path,
    *,
    seed: int = 0,
    vocabulary: int = 4_000,
    subwords: bool = False,
    units: int = 256,
    paper_vocab: bool = False,
    paper_overflow_split: bool = False,
    max_sentences: int = 256,
    public_users: int = 20,
    public_sentences: int = 64,
) -> Problem:
    """The task from the file under `data`/stackexchange; the paper's model has 10,000 words and 670 units.

    Users are private (85 %), set aside (5 %) or tested (10 %) by a hash of their name and `seed`. `public_users` of
    the private ones, with at least `public_sentences` each, are public instead. The vocabulary is that of their text,
    the Brown corpus and Wikipedia, or with ``paper_vocab=True`` of all training text, which looks at private words.

    With ``subwords=True`` it has pieces of words instead, learnt from the same public text, so that no word is unknown;
    losses are per word in either case, but a model of whole words need not spell those that it does not know.

    ``paper_overflow_split=True`` is the paper's construction: what a private user wrote beyond `max_sentences` becomes
    a public user. These people are on both sides and have no user-level guarantee; their number is told and stamped.
    """
    options = Options(
        seed=seed,
        words=vocabulary,
        subwords=subwords,
        paper_vocab=paper_vocab,
        paper_overflow_split=paper_overflow_split,
        max_sentences=max_sentences,
        public_users=public_users,
        public_sentences=public_sentences,
    )
    found = parts(data, options)
    _tell(found)
    drawn = permutation(len(found.test[0]), 0)[:CURVE_ROWS]
    return Problem(
        make_model=partial(make_model, vocabulary, units),
        loss_fn=loss_fn,
        metrics={"accuracy": accuracy},
        private=found.private,
        public=pooled(found.public_users),
        public_users=found.public_users,
        validation=weighted(found.validation, found.begins),
        test=weighted(found.test, found.begins),
        curve=weighted(take_rows(found.test, drawn), found.begins),
        population=found.population,
        about={**found.about, "test_rows": len(found.test[0]), "vocabulary_words": found.vocabulary, "units": units},
    )


def make_model(vocabulary: int = 4_000, units: int = 256) -> nn.Module:
    """Embedding, one LSTM layer and two dense layers, as in TFF's benchmark, with fresh weights."""
    return LanguageModel(vocabulary + len(SPECIAL), WIDTH, units, 1)


def loss_fn(model: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy over the words of each sentence and its end; of weighted rows, a part of the set's mean."""
    words, targets, *weights = batch
    losses = functional.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="none")
    return _per_row(losses.view(targets.shape), targets != PAD, [w[:, 0] for w in weights])


def accuracy(model: Any, batch: Batch) -> Tensor:
    """Share of right guesses where the target is a word of the vocabulary."""
    words, targets, *weights = batch
    known = targets >= len(SPECIAL)
    right = torch.eq(model(words).argmax(2), targets) & known
    return _per_row(right.double(), known, [w[:, 1] for w in weights])


def weighted(rows: Rows, begins: Tensor | None = None) -> WeightedRows:
    """The rows with the weights of `loss_fn` and `accuracy`: one over the set's mean number of targets in a row.

    For sub-words, `begins` says which numbers begin a word or end a sentence. Then a loss counts per word, and accuracy
    per piece.
    """
    words, targets = rows
    counted = targets != PAD if begins is None else begins[targets]
    counts = torch.stack([counted.sum(), (targets >= len(SPECIAL)).sum()]).double()
    return words, targets, (len(targets) / counts.clamp(min=1)).expand(len(targets), 2).contiguous()


def _per_row(values: Tensor, counted: Tensor, weights: list[Tensor]) -> Tensor:
    """Sum over each row times its weight; without weights the mean over what is counted in the row."""
    total = (values * counted).sum(1)
    return total * weights[0] if weights else total / counted.sum(1).clamp(min=1)


def _tell(found: Parts) -> None:
    for stamp in found.about["stamps"]:
        if found.both_sides and stamp.startswith("paper_overflow_split"):
            warnings.warn(stamp, stacklevel=3)
