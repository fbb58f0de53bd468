"""Sub-words for next-word prediction: pieces of words, learnt from public text by byte-pair encoding.

Every text can be written in pieces, so no word is unknown. A row is a sentence of at most 20 words and 32 pieces, in
the form of `sentences`. A loss is counted per word and not per piece, so that figures do not depend on the pieces.

References:
    - Sennrich, Haddow and Birch 2016, Neural Machine Translation of Rare Words with Subword Units, arXiv:1508.07909.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from halfsilver.errors import ConfigError
from halfsilver.tasks.sentences import BOS, EOS, LENGTH, PAD, SPECIAL, Rows, Sentence

PIECES = 32  # of a row
_BEGINS = "\u0120"  # what a space becomes, which stands before each word


@final
@dataclass(frozen=True)
class Subwords:
    """A vocabulary of pieces.

    Args:
        tokenizer: That of the tokenizers library, whose pieces are numbered from 0.
    """

    tokenizer: Any

    @classmethod
    def learn(cls, texts: Sequence[Sequence[Sentence]], size: int) -> Subwords:
        """The `size` pieces of these texts, each of which has the same weight, up to whole repetitions.

        Args:
            texts: Sentences of each text.
            size: Number of pieces, at least 256: one for each byte.
        """
        try:
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        except ImportError as error:
            raise ConfigError("Expected the package tokenizers: pip install 'halfsilver[text]'.") from error
        if size < 256:
            raise ConfigError(f"Expected vocabulary={size} to be at least 256 for sub-words, one for each byte.")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not outlive a fork
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        words = [sum(map(len, text)) for text in texts]
        repeats = [max(1, round(max(words) / max(count, 1))) for count in words]
        repeated = (s for text, often in zip(texts, repeats, strict=True) for _ in range(often) for s in text)
        tokenizer.train_from_iterator((word for sentence in repeated for word in sentence), trainer)
        return cls(tokenizer)

    def __len__(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def begins(self) -> Tensor:
        """For each number of a model, whether a target of it begins a word or ends the sentence, [pieces + 4]."""
        names = (self.tokenizer.id_to_token(i) for i in range(len(self)))
        special = [number == EOS for number in SPECIAL]
        return torch.tensor([*special, *(name.startswith(_BEGINS) for name in names)])

    def encode(self, text: Iterable[Sentence], limit: int | None = None) -> Rows:
        """Inputs and targets of the first `limit` sentences, [N, 32] each."""
        numbers = [self._numbers(sentence) for sentence in islice(text, limit)]
        both = torch.from_numpy(np.array(numbers, dtype=np.int64).reshape(-1, PIECES + 1))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _numbers(self, sentence: Sentence) -> list[int]:
        found = self.tokenizer.encode(sentence[:LENGTH], is_pretokenized=True).ids
        pieces = [i + len(SPECIAL) for i in found[:PIECES]]
        return [BOS, *pieces, EOS, *[PAD] * (PIECES - 1 - len(pieces))][: PIECES + 1]
