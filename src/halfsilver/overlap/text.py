"""Lines of text: equal word by word, or sharing most of their word triples, found by MinHash.

References:
    - Broder 1997, On the Resemblance and Containment of Documents, Compression and Complexity of Sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from zlib import crc32

from halfsilver.errors import MissingExtra, require
from halfsilver.overlap.match import Overlap, overlap

SIMILARITY = 0.5
MIN_WORDS = 8
_TRIPLE = 3
_PERMUTATIONS = 128
_MISSED = 0.01


def overlap_of_lines(
    private: Sequence[Sequence[str]],
    public: Sequence[Sequence[str]],
    *,
    similarity: float = SIMILARITY,
    min_words: int = MIN_WORDS,
) -> Overlap:
    """Find lines of text that are in both sets, equal or nearly.

    Two lines are near if they share at least `similarity` of all their triples of words (Jaccard). MinHash proposes
    pairs, and then the triples themselves are compared, so a reported pair is always that similar. Of pairs exactly at
    the limit, one in a hundred is missed; of more similar pairs, fewer.

    Args:
        private: The private lines, each a list of words.
        public: The public lines, each a list of words.
        similarity: The least share of common triples, in (0, 1]. Default 0.5. Raise it if unrelated lines are reported.
        min_words: Lines with fewer words are left aside, because they say too little to be anybody's; at least 3.
            Default 8.

    Returns:
        The overlap, which is not private.

    Raises:
        ConfigError: If an option is out of range, or if no line of a set can be compared.
        MissingExtra: If datasketch is not installed.

    Example:
        >>> line = "the quick brown fox jumps over the lazy dog".split()
        >>> overlap_of_lines([line], [line]).private.figures()["exact"]
        1

    References:
        - Broder 1997, On the Resemblance and Containment of Documents, Compression and Complexity of Sequences.
    """
    require(0 < similarity <= 1, "similarity", similarity, "in (0, 1]")
    require(min_words >= _TRIPLE, "min_words", min_words, f"at least {_TRIPLE}")
    own, shown = ([" ".join(line) if len(line) >= min_words else None for line in side] for side in (private, public))
    expected = f"lines of at least {min_words} words (set by min_words, --min-words)"
    return overlap("text", own, shown, partial(_near, similarity=similarity), expected)


def _near(private: list[str], public: list[str], similarity: float) -> Iterator[tuple[int, int, float]]:
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError as error:  # pragma: no cover - depends on the installation
        raise MissingExtra("datasketch", "overlap") from error
    options = {"num_perm": _PERMUTATIONS, "hashfunc": crc32}
    shown = [_triples(line) for line in public]
    index = MinHashLSH(num_perm=_PERMUTATIONS, params=_bands(similarity))
    for j, sketch in enumerate(MinHash.generator(shown, **options)):
        index.insert(j, sketch, check_duplication=False)
    own = [_triples(line) for line in private]
    for i, sketch in enumerate(MinHash.generator(own, **options)):
        for j in index.query(sketch):
            common = len(own[i] & shown[j])
            share = common / (len(own[i]) + len(shown[j]) - common)
            if share >= similarity:
                yield i, j, share


def _bands(similarity: float) -> tuple[int, int]:
    """Number and length of the bands of a sketch, one of which must agree: as long as the rate of misses permits.

    A pair of similarity s is missed with probability (1 - s^length)^number.

    References:
        - Leskovec, Rajaraman and Ullman 2020, Mining of Massive Datasets, 3rd edition, Cambridge, section 3.4.

    Example:
        >>> _bands(0.5), _bands(0.8)
        ((42, 3), (21, 6))
    """
    sizes = ((_PERMUTATIONS // size, size) for size in range(32, 1, -1))
    return next(((n, size) for n, size in sizes if (1 - similarity**size) ** n <= _MISSED), (_PERMUTATIONS, 1))


def _triples(line: str) -> set[bytes]:
    words = line.encode().split(b" ")
    return {b" ".join(words[i : i + _TRIPLE]) for i in range(len(words) - _TRIPLE + 1)}
