"""What holds for every feature map: rows do not see each other, and nothing changes a map."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfsilver.errors import ConfigError
from halfsilver.features import Cached, FeatureMap, Features, Frozen, RandomPatches, as_is, flipped, joined, public_pca
from halfsilver.tasks.networks import residual_cnn

SIDE = 12


def images(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    smooth = nn.functional.avg_pool2d(256 * torch.rand(rows, 3, SIDE + 2, SIDE + 2, generator=generator), 3, stride=1)
    return smooth.to(torch.uint8)


def scaled(x: Tensor) -> Tensor:
    return x.float() / 128 - 1


def scaled_and_flipped(x: Tensor) -> Tensor:
    return scaled(x).flip(-1)


class Counts(nn.Module):
    """Writes into itself also in eval mode, as observers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.largest: Tensor
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.max())
        return self.layer(x)  # type: ignore[no-any-return]


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = residual_cnn(4)
        for seed in range(3):
            model(scaled(images(20, seed)))  # running statistics
    return model  # in training mode: the map must not use that


def counts() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Counts()


def settings() -> Iterator[tuple[str, Features]]:
    patches = RandomPatches(filters=10, sample=400, size=4)
    frozen = Frozen(network(), layers=["block1", "block2", "pool"], views=[scaled, scaled_and_flipped], rows=7)
    yield "patches", patches
    yield "patches of views", RandomPatches(filters=10, sample=400, size=4, views=(as_is, flipped), grid=3)
    yield "frozen", frozen
    yield "frozen, which writes", Frozen(counts(), views=[scaled])
    yield "joined", joined(patches, frozen)
    yield "pca", public_pca(frozen, rank=9)
    yield "joined pca", joined(public_pca(patches), public_pca(frozen, rank=5))


SETTINGS = dict(settings())


@pytest.fixture(params=SETTINGS)
def fitted(request: pytest.FixtureRequest) -> FeatureMap:
    return SETTINGS[request.param].fit(images(30))


def test_features_of_a_row_do_not_change_with_the_other_rows(fitted: FeatureMap) -> None:
    x, others = images(17, seed=1), images(40, seed=2)
    z = fitted.transform(x)
    assert z.dtype == torch.float32
    assert len(z) == 17
    assert torch.isfinite(z).all()
    assert z.std(0).max() > 0, "the features tell rows apart"
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5 * float(z.abs().max())}
    torch.testing.assert_close(fitted.transform(torch.cat([others, x]))[40:], z, **near)
    torch.testing.assert_close(fitted.transform(x.flip(0)).flip(0), z, **near)
    torch.testing.assert_close(torch.cat([fitted.transform(row[None]) for row in x]), z, **near)
    torch.testing.assert_close(fitted.transform(torch.cat([x[:1], 255 - others]))[:1], z[:1], **near)


def test_other_values_beside_a_row_do_not_change_a_bit_of_it(fitted: FeatureMap) -> None:
    x, y = images(17, seed=1), images(17, seed=2)
    y[5] = x[5]
    assert torch.equal(fitted.transform(x)[5], fitted.transform(y)[5])


def test_transform_changes_neither_map_nor_rows(fitted: FeatureMap) -> None:
    before, rows = copy.deepcopy(dict(fitted.state())), images(5, seed=1)
    first = fitted.transform(rows)
    fitted.transform(images(50, seed=3))
    assert torch.equal(fitted.transform(rows), first)
    assert torch.equal(rows, images(5, seed=1))
    after = fitted.state()
    assert len(after) > 0
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_public_rows_give_the_same_map_and_no_random_number_is_drawn(name: str) -> None:
    generator = torch.get_rng_state()
    one, two = SETTINGS[name].fit(images(30)), SETTINGS[name].fit(images(30))
    assert all(torch.equal(one.state()[key], two.state()[key]) for key in one.state())
    assert torch.equal(one.transform(images(4, seed=1)), two.transform(images(4, seed=1)))
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_cache_gives_what_the_map_gives(fitted: FeatureMap, tmp_path: Path) -> None:
    x = images(9, seed=1)
    cached = Cached(map=fitted, folder=tmp_path / "kept")
    expected = fitted.transform(x)
    assert torch.equal(cached.transform(x), expected)
    (file,) = (tmp_path / "kept").glob("*.safetensors")
    assert torch.equal(cached.transform(x), expected)
    assert list((tmp_path / "kept").glob("*.safetensors")) == [file]


def test_the_suite_finds_a_map_that_mixes_rows() -> None:
    class Mixes:
        def transform(self, x: Tensor) -> Tensor:
            rows = x.float().flatten(1)
            return rows - rows.mean(0)

        def state(self) -> Any:
            return {"none": torch.zeros(1)}

        def about(self) -> Any:
            return {}

    with pytest.raises(AssertionError):
        test_features_of_a_row_do_not_change_with_the_other_rows(Mixes())
    with pytest.raises(AssertionError):
        test_other_values_beside_a_row_do_not_change_a_bit_of_it(Mixes())


def test_no_rows_are_refused(fitted: FeatureMap) -> None:
    with pytest.raises(ConfigError, match="rows"):
        fitted.transform(images(3)[:0])
