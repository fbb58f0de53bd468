"""The Stack Exchange task: text as rows, users in one part each, public words only, and figures over words."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfsilver._core.tensors import take_rows
from halfsilver.errors import ConfigError, DataMissing
from halfsilver.mirror.public import PublicLoss
from halfsilver.privacy.users.stores.base import PrivateUsers
from halfsilver.study.problem import Problem
from halfsilver.tasks import stackexchange
from halfsilver.tasks.sentences import BOS, EOS, PAD, SPECIAL, UNKNOWN, encode, frequencies, sentences, vocabulary
from halfsilver.tasks.stackexchange.data import Options, fraction, parts, said

# ---- text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It's so. Isn\u2019t it? Yes", [["it's", "so", "."], ["isn't", "it", "?"], ["yes"]]),
        ("see [The Tour](http://x.com/a?b) or https://y.org/z.html now", [["see", "the", "tour", "or", "now"]]),
        ("run `rm x` first\n```\ncode. here\n```\n<b>done</b> &amp; gone", [["run", "first"], ["done", "&", "gone"]]),
        ("a < b and version 3.5!", [["a", "<", "b", "and", "version", "3", ".", "5", "!"]]),
        ("... !!\n\n", []),
    ],
)
def test_sentences(text: str, found: list[list[str]]) -> None:
    assert list(sentences(text)) == found


def test_rows_begin_with_bos_and_end_with_eos_if_there_is_room() -> None:
    ids = {"a": 4, "b": 5}
    inputs, targets = encode([["a", "b", "c"], ["a"] * 19, ["a"] * 20, ["a"] * 30], ids)
    assert inputs[0].tolist() == [BOS, 4, 5, UNKNOWN, EOS] + [PAD] * 15
    assert targets[0].tolist() == [4, 5, UNKNOWN, EOS] + [PAD] * 16
    assert targets[1].tolist() == [4] * 19 + [EOS]
    assert torch.equal(targets[2], torch.full((20,), 4))  # cut as TFF does, without an end
    assert torch.equal(targets[3], targets[2])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert [part.shape for part in encode([], ids)] == [(0, 20), (0, 20)]
    assert len(encode([["a"]] * 9, ids, limit=4)[0]) == 4


def test_a_small_text_weighs_as_much_as_a_large_one() -> None:
    large, small = frequencies([["x", "x", "y"] * 100]), frequencies([["z"]])
    assert vocabulary([large, small], 2) == {"z": 4, "x": 5}
    assert vocabulary([large], 9) == {"x": 4, "y": 5}


def test_what_a_user_said_is_ordered_by_time_and_passes_over_what_is_not_text() -> None:
    posts: list[dict[str, Any]] = [
        {"time": "2020", "text": "Last."},
        {"time": "2010", "title": "Title", "text": "First. Second"},
        {"time": 7, "text": 8, "title": None},
        {},
    ]
    assert list(said(posts)) == [["title"], ["first", "."], ["second"], ["last", "."]]


# ---- users: a made-up file


PEOPLE = 400
FEW: dict[str, Any] = {"vocabulary": 150, "units": 8, "public_users": 5, "public_sentences": 4, "max_sentences": 6}


def text_of(person: int, word: str = "word") -> str:
    draw = random.Random(person)
    many = 1 + person % 9
    return ". ".join(" ".join(f"{word}{draw.randrange(200)}" for _ in range(draw.randint(2, 25))) for _ in range(many))


def folder(path: Path, posts: dict[str, str]) -> Path:
    for name in ("brown/brown.tokens", "wikipedia-extra/wiki.tokens"):
        (path / name).parent.mkdir(parents=True)
        (path / name).write_text(" ".join(f"{name[:2]}{i}" for i in range(30)), encoding="utf-8")
    found = [json.dumps({"user": user, "time": "2020", "text": text}) for user, text in posts.items()]
    (path / "stackexchange").mkdir()
    (path / "stackexchange/users.jsonl").write_text("\n".join(["not JSON", *found, '{"user": 3}']), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("data"), {f"site:{i}": text_of(i) for i in range(PEOPLE)})


@pytest.fixture(scope="module")
def problem(made_up: Path) -> Problem:
    return stackexchange.problem(made_up, **FEW)


def private_rows(users: PrivateUsers) -> list[Tensor]:
    store = users._open()
    return [store.rows(user, 256)[1] for user in range(store.size())]


def rows_of(*targets: Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for part in targets for row in part}


def test_every_user_is_in_one_part(made_up: Path, problem: Problem) -> None:
    split, private = problem.about["split"], private_rows(problem.private)
    assert split["users"] == PEOPLE == split["private"] + split["public"] + split["validation"] + split["test"]
    assert (split["public"], problem.population) == (5, split["private"]) == (5, len(private))
    assert abs(split["test"] - 40) < 25
    assert abs(split["validation"] - 20) < 18
    assert max(map(len, private)) == 6 == FEW["max_sentences"]
    assert problem.about["stamps"] == []
    distinct = [rows_of(*private), *(rows_of(part[1]) for part in (problem.public, problem.validation, problem.test))]
    long = [{row for row in rows if row.count(bytes(8)) < 5} for rows in distinct]  # short ones may be equal by chance
    assert min(map(len, long)) > 3
    assert sum(map(len, long)) == len(set.union(*long))
    found = parts(made_up, Options(words=150, public_users=5, public_sentences=4, max_sentences=6))
    assert found.both_sides == 0
    assert torch.equal(torch.cat([targets for _, targets in found.public_users]), problem.public[1])
    assert [len(rows[0]) for rows in problem.public_users or ()] == [len(rows[0]) for rows in found.public_users]
    assert {len(targets) for _, targets in found.public_users} <= {4, 5, 6}


def test_the_rule_is_the_one_on_record() -> None:
    """A published split must stay what it was; the digits are those of ``printf '0:3dprinting:1' | sha256sum``."""
    assert fraction("3dprinting:1", 0) == 0x58C81AF11A56E242 / 2**64
    assert fraction("3dprinting:1", 1) != fraction("3dprinting:1", 0)
    assert 0 <= fraction("\ud800", 0) < 1


def test_another_seed_is_another_split(made_up: Path, problem: Problem) -> None:
    other = stackexchange.problem(made_up, seed=1, **FEW)
    assert not torch.equal(other.public[1][:3], problem.public[1][:3])


def test_no_private_user_changes_what_is_public(made_up: Path, problem: Problem, tmp_path: Path) -> None:
    """With private users rewritten or gone, public, set-aside and test rows stay the same, and so do the words."""
    posts = {f"site:{i}": text_of(i) for i in range(PEOPLE)}
    place = {user: fraction(user, 0) for user in posts}
    candidates = sorted((user for user in posts if place[user] >= 0.15), key=place.__getitem__)
    public = [user for user in candidates if len(list(sentences(posts[user]))) >= 4][:5]
    private = [user for user in candidates if user not in public]
    secret = {user: text.replace("word", "secret") if user in private else text for user, text in posts.items()}
    fewer = {user: text for user, text in posts.items() if user not in private[::2]}
    for number, changed in enumerate((secret, fewer)):
        path = folder(tmp_path / str(number), changed)
        other = stackexchange.problem(path, **FEW)
        for name in ("public", "validation", "test", "curve"):
            assert all(torch.equal(a, b) for a, b in zip(getattr(problem, name), getattr(other, name), strict=True))
        assert other.population == len([user for user in private if user in changed])
        stamped = [stackexchange.problem(p, paper_vocab=True, **FEW) for p in (made_up, path)]
        assert stamped[0].about["stamps"] == ["paper_vocab: the vocabulary was counted on private text"]
        assert not torch.equal(stamped[0].public[0], stamped[1].public[0])  # which is why it is stamped
    rewritten = private_rows(stackexchange.problem(tmp_path / "0", **FEW).private)
    known = set(torch.cat(rewritten).flatten().tolist()) - set(SPECIAL)
    assert len(known) <= 1  # the full stop


def test_the_overflow_construction_tells_who_is_on_both_sides(made_up: Path) -> None:
    few = FEW | {"public_users": 7}
    with pytest.warns(UserWarning, match="7 people are both public and private; for them there is no user-level"):
        problem = stackexchange.problem(made_up, paper_overflow_split=True, **few)
    split = problem.about["split"]
    assert problem.about["stamps"] == [
        "paper_overflow_split: 7 people are both public and private; for them there is no user-level guarantee"
    ]
    assert split["private"] + split["validation"] + split["test"] == PEOPLE  # nobody has left the private side
    assert len(private_rows(problem.private)) == problem.population == split["private"]
    options = Options(words=150, paper_overflow_split=True, max_sentences=6, public_users=7, public_sentences=4)
    found = parts(made_up, options)
    assert found.both_sides == 7
    assert {len(targets) for _, targets in found.public_users} <= {1, 2, 3}  # of at most 9 the first 6 are private
    with pytest.warns(UserWarning, match=r"people \(999 were asked for\) are both"):
        stackexchange.problem(made_up, paper_overflow_split=True, **FEW | {"public_users": 999})
    with pytest.raises(ConfigError, match="max_sentences=50"):
        stackexchange.problem(made_up, paper_overflow_split=True, **FEW | {"max_sentences": 50})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"public_users": 999}, "public_users=999"),
        ({"public_sentences": 7}, "public_sentences=7"),
        ({"max_sentences": 0}, "max_sentences=0"),
        ({"vocabulary": 0}, "words=0"),
    ],
)
def test_options_that_cannot_be(wrong: dict[str, int], message: str, made_up: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        stackexchange.problem(made_up, **FEW | wrong)


def test_a_file_without_users(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="HALFSILVER_DATA"):
        stackexchange.problem(tmp_path)
    (tmp_path / "stackexchange").mkdir()
    (tmp_path / "stackexchange/users.jsonl").write_text('{"user": 1}\n', encoding="utf-8")
    with pytest.raises(DataMissing, match="no line with a user"):
        stackexchange.problem(tmp_path)


# ---- model, loss and figures


def test_the_paper_model_has_the_size_that_tff_states() -> None:
    """4,050,748 parameters in TFF, whose LSTM has one bias where torch has two."""
    paper, ours = (stackexchange.make_model(*size).parameters() for size in ((10_000, 670), (4_000, 256)))
    assert sum(p.numel() for p in paper) == 4_050_748 + 4 * 670
    assert sum(p.numel() for p in ours) == 4004 * 96 + 4 * 256 * (96 + 256 + 2) + (256 * 96 + 96) + (96 * 4004 + 4004)


def test_loss_and_accuracy_are_means_over_words(problem: Problem) -> None:
    torch.manual_seed(0)
    model = problem.make_model()
    for rows in (problem.test, problem.validation, problem.curve):
        words, targets, _ = rows
        logits = model(words).detach()
        each = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        over_words = float(each[targets != PAD].mean())
        assert PublicLoss(model, problem.loss_fn, rows).value() == pytest.approx(over_words, rel=1e-6)
        over_rows = PublicLoss(model, problem.loss_fn, (words, targets)).value()
        by_hand = torch.stack([e[t != PAD].mean() for e, t in zip(each, targets, strict=True)]).mean()
        assert over_rows == pytest.approx(float(by_hand), rel=1e-6) != pytest.approx(over_words, rel=1e-6)


def test_accuracy_leaves_out_special_targets() -> None:
    """A model that says 7 everywhere: right in 3 of the 4 targets that are words, and in 1/2 and 1/1 of the rows."""
    targets = torch.tensor([[7, 5, UNKNOWN, EOS], [7, 7, PAD, PAD], [UNKNOWN, EOS, PAD, PAD]])
    inputs = torch.zeros_like(targets)

    def seven(words: Tensor) -> Tensor:
        return nn.functional.one_hot(torch.full_like(words, 7), 9).double()

    assert stackexchange.accuracy(seven, (inputs, targets)).tolist() == [0.5, 1.0, 0.0]
    rows = stackexchange.weighted((inputs, targets))
    assert float(stackexchange.accuracy(seven, rows).mean()) == pytest.approx(3 / 4)
    assert float(stackexchange.loss_fn(seven, rows).mean()) > 0
    assert stackexchange.loss_fn(seven, take_rows(rows, slice(0, 2))).shape == (2,)


def test_padding_does_not_count() -> None:
    torch.manual_seed(0)
    model = stackexchange.make_model(20, 8)
    inputs, targets = encode([["a", "b"]], {"a": 4, "b": 5})
    short = stackexchange.loss_fn(model, (inputs[:, :3], targets[:, :3]))
    assert torch.allclose(stackexchange.loss_fn(model, (inputs, targets)), short)
    assert stackexchange.loss_fn(model, (inputs, torch.zeros_like(targets))).tolist() == [0.0]  # nothing to predict


# ---- the real file


@pytest.mark.paper
def test_the_real_users(data_dir: Path) -> None:
    problem = stackexchange.problem(data_dir)
    split = {name: problem.about["split"][name] for name in ("users", "private", "validation", "test", "public")}
    assert split == {"users": 7_063, "private": 5_989, "validation": 348, "test": 706, "public": 20}
    assert problem.population == problem.private._open().size() == 5_989
    assert (problem.about["vocabulary_words"], len(problem.curve[0])) == (4_000, stackexchange.CURVE_ROWS)
    for rows, limit in ((problem.validation, 0.12), (problem.test, 0.12), (problem.public, 0.08)):
        words = (rows[1] != PAD) & (rows[1] != EOS)
        unknown = int((rows[1] == UNKNOWN).sum()) / int(words.sum())
        assert 0.02 < unknown < limit
    rows = problem.private._open().rows(0, 256)
    assert 1 <= len(rows[0]) <= 256
    assert problem.loss_fn(problem.make_model(), rows).shape == (len(rows[0]),)
