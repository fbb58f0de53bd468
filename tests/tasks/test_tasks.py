"""Tasks: the split is by seed alone, nothing is learnt from private rows, and each task trains."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import halfsilver as hs
from halfsilver._core.tensors import flatten, take_rows, trainable
from halfsilver.errors import ConfigError, DataMissing
from halfsilver.privacy.gradients import BackendName, Performance
from halfsilver.study.problem import Problem
from halfsilver.tasks import TASKS, cifar10, emnist, wikitext2
from halfsilver.tasks.augment import mixed, recoloured, with_hole
from halfsilver.tasks.images import mirrored, moved, repeated
from halfsilver.tasks.split import Split
from tests.tasks.test_files import write_cifar10, write_emnist

# ---- the split


@given(seed=st.integers(0, 99), public=st.integers(0, 20), validation=st.integers(0, 20), more=st.integers(1, 50))
def test_every_row_is_in_one_part(seed: int, public: int, validation: int, more: int) -> None:
    split, rows = Split(seed=seed, public=public, validation=validation), public + validation + more
    parts, again = split.parts(rows), split.parts(rows)
    assert [len(parts.public), len(parts.validation), len(parts.private)] == [public, validation, more]
    assert sorted(torch.cat([parts.public, parts.validation, parts.private]).tolist()) == list(range(rows))
    assert torch.equal(parts.private, again.private)
    about = split.about(rows)
    assert (about["public"], about["validation"], about["private"], about["seed"]) == (public, validation, more, seed)


def test_the_rule_is_the_one_on_record() -> None:
    """A published split must stay what it was: these are the rows that seed 0 has always given."""
    parts = Split(seed=0, public=3, validation=2).parts(10)
    assert (parts.public.tolist(), parts.validation.tolist()) == ([4, 1, 7], [5, 3])
    assert not torch.equal(Split(seed=1, public=3, validation=2).parts(10).public, parts.public)


@pytest.mark.parametrize(("public", "validation"), [(6, 4), (-1, 2), (2, -1)])
def test_a_split_that_leaves_no_private_row(public: int, validation: int) -> None:
    with pytest.raises(ConfigError, match=r"Expected (public|validation)"):
        Split(seed=0, public=public, validation=validation).parts(10)


# ---- made-up files in the standard formats


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for part in ("train", "test"):
        write_emnist(folder, 120, part)
    write_cifar10(folder)
    write_text(folder, "wikitext-2/wiki.train.tokens", 60)
    write_text(folder, "wikitext-2/wiki.test.tokens", 10)
    write_text(folder, "wikipedia-extra/wiki.tokens", 8, "other")
    write_text(folder, "brown/brown.tokens", 4, "brown")
    return folder


def write_text(folder: Path, name: str, lines: int, word: str = "word") -> None:
    """Lines of 80 words: two sequences and ten words more."""
    draw = random.Random(lines)
    text = "\n\n".join(" ".join(f"{word}{draw.randrange(300)}" for _ in range(80)) for _ in range(lines))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(f" = Title = \n{text}\n", encoding="utf-8")


FEW = {"public": 12, "validation": 10}
# Stack Exchange, whose private side are users, has tests of its own.
OPTIONS: dict[str, dict[str, Any]] = {"emnist": FEW, "cifar10": {}, "wikitext2": FEW}


@pytest.fixture(scope="module")
def problems(made_up: Path) -> dict[str, Problem]:
    return {name: make(made_up, **OPTIONS[name]) for name, make in TASKS.items() if name in OPTIONS}


def rows_of(data: Any) -> set[bytes]:
    return {row.numpy().tobytes() for row in data[0]}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("emnist", (12, 10, 98, 120)), ("cifar10", (2_000, 5_000, 43_000, 10_000)), ("wikitext2", (12, 10, 98, 20))],
)
def test_parts_of_a_problem(name: str, sizes: tuple[int, ...], problems: dict[str, Problem]) -> None:
    problem = problems[name]
    data = (problem.public, problem.validation, problem.private, problem.test)
    assert tuple(len(rows[1]) for rows in data) == sizes
    assert problem.population == sizes[2] == problem.about["split"]["private"]
    assert problem.about["stamps"] == []
    distinct = [rows_of(rows) for rows in data]
    assert sum(map(len, distinct)) == sum(sizes) == len(set.union(*distinct))


def test_nothing_is_set_aside_unless_asked(made_up: Path) -> None:
    problem = TASKS["emnist"](made_up, validation=0, public=20, seed=3)
    assert (problem.validation, len(problem.public[1]), problem.population) == (None, 20, 100)


def test_a_missing_set_is_told_by_the_task(tmp_path: Path) -> None:
    for make in TASKS.values():
        with pytest.raises(DataMissing, match="HALFSILVER_DATA"):
            make(tmp_path)


# ---- text


def test_pieces_are_35_words_with_the_word_after_each() -> None:
    line = [str(i) for i in range(106)]
    found = wikitext2.pieces([line, line[:71], line[:70], line[:36], line[:35], []])
    assert [(p[0], p[-1]) for p in found] == [
        ("0", "35"), ("35", "70"), ("70", "105"), ("0", "35"), ("35", "70"), ("0", "35"), ("0", "35"),
    ]  # fmt: skip
    ids = wikitext2.vocabulary(found)
    words, targets = wikitext2.encode(found, ids)
    assert words.shape == targets.shape == (7, 35)
    assert torch.equal(words[0, 1:], targets[0, :-1])


def test_the_vocabulary_is_ranked_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wikitext2, "WORDS", 4)
    piece = ["b", "a", "c", "c", "<unk>", "<unk>", "<unk>", "d", "d", "d"]
    assert wikitext2.vocabulary([piece]) == {"<unk>": 0, "d": 1, "c": 2, "a": 3}
    assert wikitext2.vocabulary([["x"]]) == {"<unk>": 0, "x": 1}


def test_no_private_word_shapes_the_public_vocabulary(made_up: Path, tmp_path: Path) -> None:
    """With every private sequence written in other words, public, set-aside and test tensors stay the same."""
    (tmp_path / "wikitext-2").mkdir()
    parts = Split(seed=0, public=4, validation=10).parts(120)
    open_rows = {*parts.public.tolist(), *parts.validation.tolist()}
    text = (made_up / "wikitext-2/wiki.train.tokens").read_text(encoding="utf-8").split("\n")
    row = 0
    for number, line in enumerate(text):
        if len(line.split()) == 80:
            # A line has two sequences, which share a word: only lines with none that is open are rewritten.
            if not open_rows & {row, row + 1}:
                text[number] = line.replace("word", "secret")
            row += 2
    assert "secret" in "".join(text)
    (tmp_path / "wikitext-2/wiki.train.tokens").write_text("\n".join(text), encoding="utf-8")
    (tmp_path / "wikitext-2/wiki.test.tokens").write_bytes((made_up / "wikitext-2/wiki.test.tokens").read_bytes())
    clean, changed = (wikitext2.problem(folder, validation=10) for folder in (made_up, tmp_path))
    for name in ("public", "validation", "test"):
        assert all(torch.equal(a, b) for a, b in zip(getattr(clean, name), getattr(changed, name), strict=True))
    assert not torch.equal(clean.private[0], changed.private[0])
    assert clean.about == changed.about
    stamped = [wikitext2.problem(folder, validation=10, paper_vocab=True) for folder in (made_up, tmp_path)]
    assert stamped[0].about["stamps"] == ["paper_vocab: the vocabulary was counted on private text"]
    assert not torch.equal(stamped[0].public[0], stamped[1].public[0])  # which is why it is stamped


def test_other_public_text(made_up: Path) -> None:
    problem = wikitext2.problem(made_up, validation=10, public_source="ood")
    assert (len(problem.public[0]), problem.population) == (24, 110)
    assert int(problem.private[0].max()) == 0  # not one word of theirs is in the other texts
    both, own = (wikitext2.problem(made_up, validation=10, public_source=source) for source in ("both", "split"))
    assert len(both.public[0]) == 24 + len(own.public[0])
    assert both.population == own.population
    with pytest.raises(ConfigError, match="public=7"):
        wikitext2.problem(made_up, public=7, public_source="ood")
    with pytest.raises(ConfigError, match="public_source='web'"):
        wikitext2.problem(made_up, public_source="web")  # type: ignore[arg-type]


def test_text_without_a_long_line(made_up: Path, tmp_path: Path) -> None:
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2/wiki.train.tokens").write_text("a few words", encoding="utf-8")
    with pytest.raises(DataMissing, match="no line of more than 35 words"):
        wikitext2.problem(tmp_path)


# ---- networks, by hand


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_networks_have_the_sizes_of_the_appendix() -> None:
    convolutions = sum(9 * a * b + b for a, b in [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)])
    assert count(cifar10.make_model()) == convolutions + (2048 * 128 + 128) + (128 * 10 + 10)
    assert count(emnist.make_model()) == (64 * 16 + 16) + (16 * 16 * 32 + 32) + (1152 * 32 + 32) + (32 * 47 + 47)
    lstm = 4 * 120 * (120 + 120 + 2)  # four gates, with two biases each
    assert count(wikitext2.make_model()) == 8000 * 120 + 2 * lstm + (120 * 8000 + 8000)


def test_weights_come_from_the_global_generator(problems: dict[str, Problem]) -> None:
    for problem in problems.values():
        made = []
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            made.append(flatten(trainable(problem.make_model())))
        assert torch.equal(made[0], made[1])
        assert not torch.equal(made[0], made[2])


# ---- augmentation


def test_a_move_is_a_crop_of_the_padded_image() -> None:
    """Every result is one of the 9 x 9 x 2 windows of the image padded by torch's own reflection."""
    images = torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8)
    padded = torch.nn.functional.pad(images.float(), (4, 4, 4, 4), mode="reflect").byte()
    torch.manual_seed(1)
    changed = moved(images, 4, mirrored, flip=True)
    assert changed.dtype == torch.uint8
    assert changed.is_contiguous(memory_format=torch.channels_last)
    windows = [_window(padded[i], changed[i]) for i in range(40)]
    assert len(set(windows)) > 20
    assert {flipped for _, _, flipped in windows} == {True, False}
    torch.manual_seed(1)
    assert torch.equal(moved(images, 4, mirrored, flip=True), changed)


def _window(padded: Tensor, image: Tensor) -> tuple[int, int, bool]:
    return next(
        (y, x, flipped)
        for y in range(9)
        for x in range(9)
        for flipped in (False, True)
        if torch.equal(
            padded[:, y : y + 32, x : x + 32].flip(2) if flipped else padded[:, y : y + 32, x : x + 32], image
        )
    )


def test_letters_move_but_are_not_mirrored() -> None:
    images = torch.zeros(50, 1, 28, 28)
    images[:, :, 10, 10:14] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    changed, labels = emnist.augment((images, torch.arange(50)))
    assert torch.equal(labels, torch.arange(50))
    assert changed.dtype == torch.float32
    places = changed.squeeze(1).flatten(1).topk(4).indices
    assert (places[:, 0] - places[:, 3] == 3).all()
    assert {divmod(int(p), 28) for p in places[:, 3]} <= {(y, x) for y in range(8, 13) for x in range(8, 13)}
    assert repeated(torch.tensor([-2, 0, 27, 29]), 28).tolist() == [0, 0, 27, 27]


def test_colours_change_within_their_bounds_and_grey_has_no_saturation() -> None:
    torch.manual_seed(0)
    grey = torch.full((200, 3, 4, 4), 100.0)
    changed = recoloured(grey, 0.25)  # one value everywhere: only brightness and the channels' gains can act
    assert changed.min() >= 100 * 0.75 * 0.875
    assert changed.max() <= 100 * 1.25 * 1.125
    assert changed.std(0).min() > 5
    assert recoloured(torch.full((9, 3, 4, 4), 255, dtype=torch.uint8), 0.25).max() <= 255


def test_a_hole_is_a_square_of_grey() -> None:
    torch.manual_seed(0)
    holes = (with_hole(torch.zeros(300, 3, 32, 32), 12) == 127.5)[:, 0].flatten(1).sum(1)
    assert holes.max() == 144
    assert holes.min() >= 36  # a quarter of it, in a corner


def test_mixing_keeps_the_sum_of_labels_and_goes_with_the_images() -> None:
    torch.manual_seed(0)
    images, labels = torch.arange(4.0).reshape(4, 1, 1, 1), torch.arange(4)
    blended, shares = mixed(images, labels, 4, 0.4)
    assert shares.sum(1).tolist() == pytest.approx([1.0] * 4)
    assert blended.flatten().tolist() == pytest.approx((shares @ torch.arange(4.0)).tolist())
    assert 0 < shares[0, 0] < 1
    torch.manual_seed(0)
    smooth = mixed(images, labels, 4, 0.4, smoothing=0.2)[1]
    torch.testing.assert_close(smooth, 0.8 * shares + 0.05)


# ---- training


def fit(
    problem: Problem,
    folder: Path,
    backend: BackendName = "auto",
    autocast: torch.dtype | None = None,
    rows: int | None = None,
) -> Tensor:
    """Two private steps of pda on a few rows from a model with two epochs of pretraining."""
    torch.manual_seed(0)
    model = problem.make_model()
    private, public = take_rows(problem.private, slice(0, 40)), take_rows(problem.public, slice(0, 12))
    trainer = hs.Trainer(
        model,
        problem.loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        plan=hs.PrivacyPlan(steps=2, sampling_rate=0.2, expected_batch_size=8, noise_multiplier=1.0),
        mirror=hs.FirstOrder(hs.cosine(end=0.9)),
        public_batch_size=4,
        metrics=problem.metrics,
        performance=Performance(backend=backend, autocast=autocast, micro_batch_size=rows),
        unsafe_seed=0,
        progress=False,
    )
    trainer.pretrain(public, epochs=2, transform=problem.augment)
    result = trainer.fit(private, public, run_dir=folder, test=take_rows(problem.test, slice(0, 20)))
    assert result.updates == 2
    assert {"loss", *problem.metrics} <= set(result.history[-1])
    return flatten([p.detach() for p in trainable(model)])


@pytest.mark.paper
@pytest.mark.parametrize("name", OPTIONS)
def test_each_task_trains(name: str, problems: dict[str, Problem], tmp_path: Path) -> None:
    weights = fit(problems[name], tmp_path, autocast=None if name == "wikitext2" else torch.bfloat16)
    assert torch.isfinite(weights).all()


@pytest.mark.paper
def test_images_may_stay_bytes_until_the_loss(problems: dict[str, Problem], tmp_path: Path) -> None:
    """The same weights by batched and by per-example passes, and from the same images as floating-point numbers."""
    problem = problems["emnist"]
    private, public, test = ((x.float(), y) for x, y in (problem.private, problem.public, problem.test))
    floats = replace(problem, private=private, public=public, test=test)
    expected = fit(problem, tmp_path / "book", "book", rows=64)  # dropout goes by the piece
    torch.testing.assert_close(fit(problem, tmp_path / "vmap", "vmap", rows=64), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(fit(floats, tmp_path / "floats", "book", rows=64), expected, atol=1e-6, rtol=1e-5)


# ---- the real files


def test_real_cifar10(data_dir: Path) -> None:
    problem = TASKS["cifar10"](data_dir, validation=0)
    assert (problem.population, len(problem.public[1])) == (48_000, 2_000)
    labels = torch.cat([problem.private[1], problem.public[1]])
    assert labels.bincount().tolist() == [5_000] * 10
    assert problem.test[1][:4].tolist() == [3, 8, 8, 0]  # a cat, two ships, an aeroplane
    assert problem.test[0][0, :, 0, 0].tolist() == [158, 112, 49]


def test_real_emnist(data_dir: Path) -> None:
    problem = TASKS["emnist"](data_dir)
    rows = problem.about["split"]["rows"]
    assert problem.population == rows - rows * 4 // 100 - 5_000
    assert len(problem.curve[1]) == 10_000
    images, labels = problem.public
    seven = images[labels == 7, 0].float().mean(0)  # upright, its corner is at the upper right
    assert seven[:10, 18:].sum() > 2 * seven[18:, :10].sum()


def test_real_wikitext2(data_dir: Path) -> None:
    problem = TASKS["wikitext2"](data_dir)
    assert problem.about["split"]["rows"] == 48_764  # the paper's 48.8k
    assert problem.about["vocabulary_words"] == 8_000
    assert problem.about["test_rows"] == len(problem.test[0]) == 5_716
    assert int(problem.public[0].max()) < 8_000
