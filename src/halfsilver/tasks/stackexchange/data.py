"""The users of the Stack Exchange task: who is private, public, set aside or tested, and the vocabulary.

The split is by a hash of the user's name. The public users are volunteers among those who would be private: the first
20, in the order of the hash, with at least 64 sentences. Taking a private user out of the file therefore changes
nobody else's part, and no public user.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from halfsilver.errors import ConfigError, DataMissing, require
from halfsilver.privacy.users.stores.base import PrivateUsers
from halfsilver.privacy.users.stores.jsonl import JsonlUsers, Record, records
from halfsilver.tasks import files
from halfsilver.tasks.sentences import Rows, Sentence, encode, frequencies, sentences, untokenised, vocabulary
from halfsilver.tasks.subwords import Subwords

FILE = "stackexchange/users.jsonl"
STACKEXCHANGE = files.Source("Stack Exchange posts and comments by user", "https://archive.org/details/stackexchange")
PAPER_VOCAB = "paper_vocab: the vocabulary was counted on private text"
TEST, VALIDATION = 0.10, 0.05  # shares of the users

_RULE = "sha256 of 'seed:user' as a fraction: below 0.10 test, below 0.15 validation, else private"
_CLEAN_RULE = "of these the first in the order of the hash with enough sentences are public instead"
_OVERFLOW_RULE = "what a private user wrote beyond the limit is made a public user"

Posts = dict[str, list[Record]]


class Numbered(Protocol):
    """Rows of the first sentences of a text."""

    def __call__(self, text: Iterable[Sentence], limit: int | None = None) -> Rows: ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is chosen about the data; see `stackexchange.problem`."""

    seed: int = 0
    words: int = 4_000
    subwords: bool = False
    paper_vocab: bool = False
    paper_overflow_split: bool = False
    max_sentences: int = 256
    public_users: int = 20
    public_sentences: int = 64

    def __post_init__(self) -> None:
        for name in ("words", "max_sentences", "public_users"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(not (self.subwords and self.paper_vocab), "subwords", True, "not to go with paper_vocab")
        least, most = self.public_sentences, self.max_sentences
        require(0 <= least <= most, "public_sentences", least, f"from 0 to max_sentences={most}")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The private users behind their handle, and everybody else's rows: users one by one, or pooled.

    `vocabulary` is the number of words or pieces; `begins` says of pieces which begin a word, and is None for words.
    `both_sides` is the number of people who are public and private at once; they have no user-level guarantee.
    """

    private: PrivateUsers
    population: int
    public_users: Sequence[Rows]
    validation: Rows
    test: Rows
    vocabulary: int
    begins: Tensor | None
    both_sides: int
    about: dict[str, Any]


def fraction(user: str, seed: int) -> float:
    """A number in [0, 1) that depends on the name and the seed alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{user}".encode(errors="surrogatepass")).digest()[:8], "big") / 2**64


def parts(data: Path, options: Options) -> Parts:
    """The users of `data`/stackexchange/users.jsonl; their number is that of the file, a published constant."""
    path = files.find(data, FILE, STACKEXCHANGE)
    posts = _by_user(path)
    place = {user: fraction(user, options.seed) for user in posts}
    test = [user for user in posts if place[user] < TEST]
    validation = [user for user in posts if TEST <= place[user] < TEST + VALIDATION]
    candidates = sorted((user for user in posts if place[user] >= TEST + VALIDATION), key=place.__getitem__)
    choose = _overflow if options.paper_overflow_split else _volunteers
    public = choose(posts, candidates, options)
    private = frozenset(candidates if options.paper_overflow_split else set(candidates) - set(public))
    written = list(public.values())
    texts = [_other_text(data), _joined(written)] if options.subwords else []
    pieces = Subwords.learn([list(text) for text in texts], options.words) if texts else None
    ids = {} if pieces else _vocabulary(data, posts, candidates, written, options)
    numbered: Numbered = pieces.encode if pieces else lambda text, limit=None: encode(text, ids, limit)
    limit, both_sides = options.max_sentences, len(private.intersection(public))
    store = JsonlUsers(path, encode=lambda found: numbered(said(found), limit), chosen=private.__contains__)
    return Parts(
        private=PrivateUsers(store),
        population=len(private),
        public_users=[numbered(text) for text in written],
        validation=numbered(_capped(posts, validation, limit)),
        test=numbered(_capped(posts, test, limit)),
        vocabulary=len(pieces or ids),
        begins=pieces.begins if pieces else None,
        both_sides=both_sides,
        about=_about(options, [len(posts), len(private), len(validation), len(test), len(public)], both_sides),
    )


def said(posts: Iterable[Record]) -> Iterator[Sentence]:
    """The sentences of one user by time, titles before texts; what is not text is passed over."""
    for post in sorted(posts, key=lambda post: str(post.get("time"))):
        for part in (post.get("title"), post.get("text")):
            if isinstance(part, str):
                yield from sentences(part)


def _by_user(path: Path) -> Posts:
    found: Posts = {}
    for _, _, record in records(path):
        found.setdefault(record["user"], []).append(record)
    if not found:
        raise DataMissing(f"The file {path} has no line with a user; it is not {STACKEXCHANGE.name}.")
    return found


def _volunteers(posts: Posts, candidates: Sequence[str], options: Options) -> dict[str, list[Sentence]]:
    """Public users and their sentences."""
    told = ((user, list(islice(said(posts[user]), options.max_sentences))) for user in candidates)
    enough = ((user, text) for user, text in told if len(text) >= options.public_sentences)
    public = dict(islice(enough, options.public_users))
    wanted = options.public_users
    require(len(public) == wanted, "public_users", wanted, f"to be at most the {len(public)} who have written enough")
    return public


def _overflow(posts: Posts, candidates: Sequence[str], options: Options) -> dict[str, list[Sentence]]:
    """What the first private users with too many sentences wrote beyond the limit: at most as much again."""
    limit = options.max_sentences
    beyond = ((user, list(islice(said(posts[user]), limit, 2 * limit))) for user in candidates)
    public = dict(islice(((user, text) for user, text in beyond if text), options.public_users))
    if not public:
        raise ConfigError(f"Nobody has more than max_sentences={limit}, so paper_overflow_split has no public user.")
    return public


def _vocabulary(
    data: Path, posts: Posts, candidates: Sequence[str], public: Sequence[list[Sentence]], options: Options
) -> dict[str, int]:
    """Numbers of words, counted on public text unless `paper_vocab`; the public users weigh as much as all else."""
    if options.paper_vocab:
        return vocabulary([frequencies(_capped(posts, candidates, options.max_sentences))], options.words)
    return vocabulary([frequencies(_other_text(data)), frequencies(_joined(public))], options.words)


def _joined(texts: Iterable[Iterable[Sentence]]) -> Iterator[Sentence]:
    return (sentence for text in texts for sentence in text)


def _other_text(data: Path) -> Iterator[Sentence]:
    for name, source in (("brown/brown.tokens", files.BROWN), ("wikipedia-extra/wiki.tokens", files.WIKIPEDIA)):
        for line in files.tokens(data, name, source):
            yield from sentences(untokenised(line))


def _capped(posts: Posts, users: Iterable[str], limit: int) -> Iterator[Sentence]:
    for user in users:
        yield from islice(said(posts[user]), limit)


def _about(options: Options, sizes: Sequence[int], both_sides: int) -> dict[str, Any]:
    names = ("users", "private", "validation", "test", "public")
    rule = _OVERFLOW_RULE if options.paper_overflow_split else _CLEAN_RULE
    words = (
        "all training text" if options.paper_vocab else "the text of the public users, the Brown corpus and Wikipedia"
    )
    kind = "sub-words learnt from" if options.subwords else "counted on"
    stamps = [PAPER_VOCAB] if options.paper_vocab else []
    return {
        "data": "Stack Exchange posts and comments",
        "sentences": f"the first {options.max_sentences} of a user by time, cut after 20 words",
        "vocabulary": f"{kind} {words}",
        "split": {"rule": f"{_RULE}; {rule}", "seed": options.seed, **dict(zip(names, sizes, strict=True))},
        "stamps": [*stamps, *_overflow_stamp(options, both_sides)],
    }


def _overflow_stamp(options: Options, both_sides: int) -> list[str]:
    if not options.paper_overflow_split:
        return []
    short = f" ({options.public_users} were asked for)" if both_sides < options.public_users else ""
    people = f"{both_sides} people{short} are both public and private"
    return [f"paper_overflow_split: {people}; for them there is no user-level guarantee"]
