"""Each kind of features against an independent calculation, and the cache."""

from __future__ import annotations

import logging
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfsilver.errors import ConfigError
from halfsilver.features import Cached, Frozen, RandomPatches, as_is, flipped, joined, patches, public_pca
from halfsilver.features.cache import WARNING
from tests.features.test_contract import images, network, scaled, scaled_and_flipped

# ---- patches


@pytest.mark.parametrize("at_once", [4, 256])
def test_patches_are_what_the_formula_says(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch by patch in float64, with NumPy, from the filters of the map and from the definition of each step."""
    monkeypatch.setattr(patches, "_FILTERS", at_once)
    settings = RandomPatches(filters=6, size=4, grid=2, bias=0.3, sample=300, contrast=1e-3, damping=0.05, seed=3)
    fitted = settings.fit(images(12))
    image = images(1, seed=9)[0].numpy() / 255.0
    weights, offset = fitted.weights.double().numpy(), fitted.offset.double().numpy()
    side = image.shape[1] - 3
    pooled: dict[tuple[int, int], list[np.ndarray[Any, Any]]] = {}
    for y in range(side):
        for x in range(side):
            patch = image[:, y : y + 4, x : x + 4].reshape(-1)
            patch = (patch - patch.mean()) / np.sqrt(patch.var() + 1e-3)
            r = patch @ weights + offset
            both = np.concatenate([np.maximum(r - 0.3, 0), np.maximum(-r - 0.3, 0)])
            for a in (0, 1):  # 9 places: the cells 0..4 and 4..8 overlap
                for b in (0, 1):
                    if a * side // 2 <= y < -(-(a + 1) * side // 2) and b * side // 2 <= x < -(-(b + 1) * side // 2):
                        pooled.setdefault((a, b), []).append(both)
    expected = np.concatenate([np.mean(pooled[a, b], axis=0) for a in (0, 1) for b in (0, 1)])
    got = fitted.transform(images(1, seed=9))[0].numpy()
    assert expected.max() > 0.05
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_filters_are_whitened_patches_of_public_images() -> None:
    settings = RandomPatches(filters=40, size=3, sample=20_000, damping=1e-6)
    fitted = settings.fit(images(40))
    fresh = settings._normalised(settings._drawn(images(40), torch.Generator().manual_seed(7))).double()
    responses = fresh @ fitted.weights.double() + fitted.offset.double()
    # Whitened patches have mean 0 and variance 1 along every direction of norm 1, and so along each filter. A patch has
    # no mean of its own, so one direction of the 27 is missing. n = 20,000: the deviation of a variance is about 1 %.
    assert responses.mean(0).abs().max() < 0.06
    assert (responses.std(0) - 1).abs().max() < 0.08
    unwhitened = fresh @ fresh[:40].T / fresh[:40].norm(dim=1)
    assert (unwhitened.std(0) - 1).abs().max() > 0.3, "without whitening the same check fails"


def test_patches_with_views_are_means_over_views() -> None:
    plain, both = (RandomPatches(filters=5, size=4, sample=200, views=v) for v in [(as_is,), (as_is, flipped)])
    x, public = images(5, seed=1), images(20)
    expected = (plain.fit(public).transform(x) + plain.fit(public).transform(x.flip(-1))) / 2
    torch.testing.assert_close(both.fit(public).transform(x), expected)


@pytest.mark.parametrize(
    "options",
    [{"filters": 0}, {"size": 1}, {"grid": 0}, {"bias": -1.0}, {"sample": 9}, {"white": 0.0}, {"contrast": 0.0},
     {"damping": 0.0}, {"views": ()}],
    ids=str,
)  # fmt: skip
def test_settings_of_patches_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        RandomPatches(**{"filters": 10, **options})


def test_images_are_checked() -> None:
    with pytest.raises(ConfigError, match="shape of public images"):
        RandomPatches(filters=2, sample=9, size=13).fit(images(3))
    with pytest.raises(ConfigError, match="grid"):
        RandomPatches(filters=2, sample=9, size=12, grid=2).fit(images(3))


# ---- frozen networks


def test_frozen_features_are_the_outputs_in_eval_mode() -> None:
    model, x = network(), images(9, seed=1)
    fitted = Frozen(model, layers=["block1", "pool", ""], views=[scaled, scaled_and_flipped], grid=3, rows=4).fit()
    got = fitted.transform(x)
    assert model.training, "the module itself stays as it is"
    parts: dict[str, Any] = dict(model.eval().named_children())

    def by_hand(x: Tensor) -> Tensor:
        block1 = parts["block1"](parts["shrink1"](parts["first"](x)))
        pool = parts["pool"](parts["shrink3"](parts["block2"](parts["shrink2"](block1))))
        cells = [block1[:, :, a : a + 2, b : b + 2].mean((2, 3)) for a in (0, 2, 4) for b in (0, 2, 4)]
        return torch.cat([torch.stack(cells, 2).flatten(1), pool, parts["head"](pool)], 1)

    with torch.no_grad():
        expected = (by_hand(scaled(x)) + by_hand(scaled_and_flipped(x))) / 2
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not got.requires_grad


def test_later_training_does_not_change_the_features() -> None:
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    fitted = Frozen(model).fit()
    before = fitted.transform(x)
    nn.init.zeros_(model.weight)
    assert torch.equal(fitted.transform(x), before)


def test_modules_with_several_inputs() -> None:
    layer, a, b = nn.Bilinear(2, 3, 4), torch.randn(5, 2), torch.randn(5, 3)
    fitted = Frozen(layer).fit()
    torch.testing.assert_close(fitted.transform((a, b)), layer(a, b).detach())
    torch.testing.assert_close(fitted.transform({"input1": a, "input2": b}), layer(a, b).detach())


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), x


def test_layers_are_checked() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Frozen(Skips(), layers=["nowhere"])
    with pytest.raises(ConfigError, match="at least one layer"):
        Frozen(Skips(), layers=[])
    with pytest.raises(ConfigError, match=r"unused.*called"):
        Frozen(Skips(), layers=["unused"]).fit().transform(torch.zeros(1, 2))
    with pytest.raises(ConfigError, match="return a tensor"):
        Frozen(Skips()).fit().transform(torch.zeros(1, 2))


# ---- public statistics


class Columns(nn.Module):
    """Features that are the row itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def spread(rows: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    mixing = torch.randn(width, width, generator=generator)
    return torch.randn(rows, width, generator=generator) @ mixing + 3


@pytest.mark.parametrize(("rows", "width"), [(60, 5), (6, 20)], ids=["tall", "wide"])
def test_pca_against_the_singular_value_decomposition(rows: int, width: int) -> None:
    public, x = spread(rows, width), spread(7, width)
    fitted = public_pca(Frozen(Columns()), floor=0.0).fit(public)
    mean, sd = public.double().mean(0), public.double().std(0, correction=0)
    _, values, axes = torch.linalg.svd((public.double() - mean) / sd, full_matrices=False)
    kept = min(rows - 1, width)
    assert fitted.axes.shape == (width, kept)
    torch.testing.assert_close(fitted.variances.double(), (values**2 / rows)[:kept], rtol=1e-4, atol=1e-6)
    expected = ((x.double() - mean) / sd) @ axes[:kept].T
    torch.testing.assert_close(fitted.transform(x).double().abs(), expected.abs(), rtol=1e-3, atol=1e-4)
    few = public_pca(Frozen(Columns()), floor=0.0, rank=3).fit(public)
    torch.testing.assert_close(few.transform(x), fitted.transform(x)[:, :3])


def test_features_that_do_not_vary_are_not_scaled_up() -> None:
    public = torch.cat([spread(40, 3), torch.full((40, 1), 7.0)], 1)
    other = public[:1] + torch.tensor([0.0, 0.0, 0.0, 1e-3])
    for floor in (0.0, 0.01):
        fitted = public_pca(Frozen(Columns()), floor=floor).fit(public)
        assert torch.isfinite(fitted.transform(other)).all()
        assert fitted.transform(other).norm() < 10
    with pytest.raises(ConfigError, match="variance"):
        public_pca(Frozen(Columns())).fit(torch.ones(5, 2))


def test_blocks_are_joined_with_equal_energy() -> None:
    public = spread(50, 4)
    large = Frozen(nn.Sequential(Columns(), nn.Linear(4, 9)), views=[lambda x: 100 * x])
    z = joined(large, Frozen(Columns())).fit(public).transform(public)
    assert z.shape == (50, 13)
    assert z.mean(0).abs().max() < 1e-5
    for block in (z[:, :9], z[:, 9:]):
        assert block.square().sum(1).mean().item() == pytest.approx(1, rel=1e-5)
    with pytest.raises(ConfigError, match="at least 2"):
        joined(large)
    with pytest.raises(ConfigError, match="energy of part 1"):
        joined(large, Frozen(Columns(), views=[lambda x: 0 * x])).fit(public)


# ---- the cache


class Once:
    """A map that can be asked once for each batch."""

    def __init__(self, scale: float) -> None:
        self.scale, self.asked = torch.tensor(scale), 0

    def transform(self, x: Tensor) -> Tensor:
        self.asked += 1
        return x.float() * self.scale

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale}

    def about(self) -> dict[str, Any]:
        return {"kind": "once"}


def test_the_cache_is_keyed_by_map_and_rows(tmp_path: Path) -> None:
    once, x = Once(2.0), torch.arange(6.0).reshape(3, 2)
    for _ in range(2):
        assert torch.equal(Cached(map=once, folder=tmp_path).transform(x), 2 * x)
    assert once.asked == 1
    column_order = x.T.contiguous().T  # other strides, the same rows
    assert torch.equal(Cached(map=once, folder=tmp_path).transform(column_order), 2 * x)
    assert once.asked == 1
    for other in (x.flip(0), x[:2], x.double(), x.reshape(2, 3)):
        assert torch.equal(Cached(map=once, folder=tmp_path).transform(other), 2 * other.float())
    assert once.asked == 5
    assert torch.equal(Cached(map=Once(3.0), folder=tmp_path).transform(x), 3 * x)
    half = Cached(map=once, folder=tmp_path, dtype=torch.float16).transform(x + 1e-4)
    assert half.dtype == torch.float32
    assert not torch.equal(half, 2 * (x + 1e-4))
    torch.testing.assert_close(half, 2 * (x + 1e-4), rtol=1e-3, atol=1e-3)


def test_the_cache_says_that_it_is_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "kept"
    with caplog.at_level(logging.WARNING, logger="halfsilver"):
        Cached(map=Once(1.0), folder=folder).transform(torch.ones(2, 2))
        Cached(map=Once(1.0), folder=folder).transform(torch.zeros(2, 2))
    assert [WARNING in record.message for record in caplog.records] == [True]  # once for each folder
    assert "as private as the records" in (folder / "PRIVATE.txt").read_text()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_damaged_file_is_written_again(tmp_path: Path) -> None:
    once, x = Once(2.0), torch.ones(3, 2)
    Cached(map=once, folder=tmp_path).transform(x)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    assert torch.equal(Cached(map=once, folder=tmp_path).transform(x), 2 * x)
    assert torch.equal(Cached(map=once, folder=tmp_path).transform(x), 2 * x)
    assert once.asked == 2


def test_a_lambda_has_no_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="views"):
        Cached(map=Frozen(Columns(), views=[lambda x: x]).fit(), folder=tmp_path)
