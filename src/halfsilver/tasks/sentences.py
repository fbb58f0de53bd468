"""Text as rows for next-word prediction: sentences, words, vocabulary, and numbers in the form of TFF's benchmark.

A row is a sentence of at most 20 words: the inputs begin with BOS, the targets end with EOS if there is room for it,
and both are filled up with PAD. A model has the words of the vocabulary and these four special ones.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

PAD, UNKNOWN, BOS, EOS = SPECIAL = range(4)
LENGTH = 20

Sentence = list[str]
Rows = tuple[Tensor, Tensor]  # inputs and targets, [N, 20] each

_NOT_PROSE = [
    (re.compile(r"```.*?```", re.DOTALL), " "),
    (re.compile(r"`[^`\n]*`"), " "),
    (re.compile(r"!?\[([^\[\]\n]*)\]\([^()\s]*\)"), r"\1"),  # a link keeps its words
    (re.compile(r"(?:https?://|www\.)\S+"), " "),
    (re.compile(r"</?[a-zA-Z][^<>\n]*>"), " "),
]
_END = re.compile(r"(?<=[.!?])\s+|\n+")
_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")
_REJOIN = [  # what the token files take apart and this tokeniser keeps together
    (re.compile(r" @(\S)@ "), r"\1"),
    (re.compile(r" '(?=(?:s|m|d|t|re|ve|ll)\b)", re.IGNORECASE), "'"),
]


def sentences(text: str) -> Iterator[Sentence]:
    """Words and punctuation marks of each sentence, in lower case; sentences without a word are left out."""
    for pattern, instead in _NOT_PROSE:
        text = pattern.sub(instead, text)
    text = html.unescape(text).replace("\u2019", "'").lower()
    for piece in _END.split(text):
        words = _WORD.findall(piece)
        if any(word[0].isalnum() for word in words):
            yield words


def untokenised(words: Sequence[str]) -> str:
    """A line of a token file as plain text, so that the same tokeniser reads all texts.

    >>> untokenised("It 's well @-@ known .".split())
    "It's well-known ."
    """
    text = " ".join(words)
    for pattern, instead in _REJOIN:
        text = pattern.sub(instead, text)
    return text


def frequencies(text: Iterable[Sentence]) -> dict[str, float]:
    """Each word's share of `text`."""
    counts = Counter(word for sentence in text for word in sentence)
    total = counts.total()
    return {word: count / total for word, count in counts.items()}


def vocabulary(parts: Iterable[Mapping[str, float]], words: int) -> dict[str, int]:
    """Numbers of the `words` most frequent words, by the sum of their shares over `parts`.

    Shares give a small text the weight of a large one. Ties go by the alphabet, not by the order of the text.
    """
    shares: Counter[str] = Counter()
    for part in parts:
        for word, share in part.items():
            shares[word] += share  # type: ignore[assignment]  # a Counter of floats is a sum
    ranked = sorted(shares, key=lambda word: (-shares[word], word))
    return {word: i for i, word in enumerate(ranked[:words], start=len(SPECIAL))}


def encode(text: Iterable[Sentence], ids: Mapping[str, int], limit: int | None = None) -> Rows:
    """Inputs and targets of the first `limit` sentences."""
    numbers = [_numbers(sentence, ids) for sentence in islice(text, limit)]
    both = torch.from_numpy(np.array(numbers, dtype=np.int64).reshape(-1, LENGTH + 1))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def _numbers(sentence: Sentence, ids: Mapping[str, int]) -> list[int]:
    words = [ids.get(word, UNKNOWN) for word in sentence[:LENGTH]]
    return [BOS, *words, EOS, *[PAD] * (LENGTH - 1 - len(words))][: LENGTH + 1]
