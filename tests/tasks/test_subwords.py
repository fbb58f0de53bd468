"""Sub-words: no word is unknown, a row is a sentence, and losses are per word."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfsilver.errors import ConfigError
from halfsilver.tasks import stackexchange
from halfsilver.tasks.sentences import BOS, EOS, PAD, SPECIAL, UNKNOWN
from halfsilver.tasks.stackexchange.data import Options
from halfsilver.tasks.subwords import PIECES, Subwords

pytest.importorskip("tokenizers", reason="needs the extra text")

TEXT = [["the", "cat", "sat", "on", "the", "mat", "."], ["the", "hat", "that", "sat", "."]] * 20
OTHER = [["zebra", "zebras", "zero"]]
WORDS = st.text(st.characters(categories=["Ll", "Lo", "Nd"]), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def subwords() -> Subwords:
    return Subwords.learn([TEXT, OTHER], 300)


@settings(max_examples=50, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=4))
def test_any_words_come_back(subwords: Subwords, words: list[str]) -> None:
    inputs, targets = subwords.encode([words])
    assert inputs.shape == targets.shape == (1, PIECES)
    assert int(inputs[0, 0]) == BOS
    assert UNKNOWN not in targets
    pieces = [int(i) - len(SPECIAL) for i in targets[0] if int(i) >= len(SPECIAL)]
    whole, found = " " + " ".join(words), subwords.tokenizer.decode(pieces)
    assert found == whole if EOS in targets else whole.startswith(found.rstrip("\ufffd"))


def test_rows_have_an_end_and_padding(subwords: Subwords) -> None:
    inputs, targets = subwords.encode([["the", "cat"], ["xyxyxyxy" * 9]])
    end = int((targets[0] == EOS).nonzero())
    assert (targets[0, end + 1 :] == PAD).all()
    assert torch.equal(inputs[0, 1 : end + 1], targets[0, :end])
    assert EOS not in targets[1]  # no room for it


def test_frequent_words_are_one_piece_and_a_small_text_weighs_as_much(subwords: Subwords) -> None:
    assert 256 < len(subwords) <= 300
    for word in ("the", "sat", "zebra"):
        assert len(subwords.tokenizer.encode([word], is_pretokenized=True).ids) == 1


def test_begins_counts_words_and_the_end(subwords: Subwords) -> None:
    _, targets = subwords.encode([["the", "quixotic", "zebras"], ["a"]])
    assert subwords.begins[targets].sum(1).tolist() == [4, 2]


def test_the_loss_of_weighted_rows_is_per_word(subwords: Subwords) -> None:
    """A model that is equally unsure of everything: its loss per word is log(size) times pieces per word."""
    rows = subwords.encode([["the", "quixotic", "zebras"], ["a", "cat"]])
    size = len(subwords) + len(SPECIAL)
    batch = stackexchange.weighted(rows, subwords.begins)
    losses = stackexchange.loss_fn(lambda words: torch.zeros(*words.shape, size), batch)
    pieces, words = int((rows[1] != PAD).sum()), 4 + 3
    assert pieces > words
    assert float(losses.mean()) == pytest.approx(pieces / words * torch.tensor(float(size)).log().item())


def test_impossible_choices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="at least 256"):
        Subwords.learn([TEXT], 255)
    with pytest.raises(ConfigError, match="subwords"):
        Options(subwords=True, paper_vocab=True)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"halfsilver\[text\]"):
        Subwords.learn([TEXT], 300)
