from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfsilver.errors import ConfigError, UnsupportedLayer
from halfsilver.privacy.gradients.probe import probe


def loss(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return model(batch).square().flatten(1).mean(1)


class Centred(nn.Module):
    """Takes the batch's mean off: no buffer, no normalisation layer, and yet it mixes examples."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.abs().sum().detach()
        return x


class TokenMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        e = self.embed(ids)
        return e + e.sum(0, keepdim=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "mixer",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, track_running_stats=False),
        Centred(),
        nn.LSTM(3, 3).requires_grad_(True),
    ],
)
def test_mixing_modules_are_refused(mixer: nn.Module) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(3, 3), mixer)
    if isinstance(mixer, nn.LSTM):  # time on dimension 0: the batch is read as a sequence
        model = nn.Sequential(mixer)
        with pytest.raises(UnsupportedLayer, match="batch_first"):
            probe(model, lambda m, b: m(b)[0].square().mean(1), torch.randn(4, 3))
        return
    with pytest.raises(UnsupportedLayer, match=r"past the noise|depends on another"):
        probe(model, loss, torch.randn(4, 3))


def test_outputs_that_broadcast_against_labels_are_refused_with_a_hint() -> None:
    def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.as_tensor((model(batch[0]) - batch[1]).square().mean(1))  # (4, 1) - (4,) is (4, 4)

    with pytest.raises(UnsupportedLayer, match=r"shapes \(N, 1\) and \(N,\), which broadcast"):
        probe(nn.Linear(3, 1), squared, (torch.randn(4, 3), torch.randn(4)))


def test_integer_input_that_mixes_is_refused() -> None:
    with pytest.raises(UnsupportedLayer, match="depends on another"):
        probe(TokenMixer(), loss, torch.randint(0, 2, (4, 5)))


def test_changing_buffers_are_refused_and_restored() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Counting())
    with pytest.raises(UnsupportedLayer, match=r"1\.seen"):
        probe(model, loss, torch.randn(4, 3))
    assert float(dict(model.named_buffers())["1.seen"]) == 0.0


def test_the_message_says_how_to_mend_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(UnsupportedLayer, match=r"GroupNorm.*\.eval\(\)"):
        probe(model, loss, torch.randn(4, 3))
    model[1].eval()
    probe(model, loss, torch.randn(4, 3))


def test_weights_that_a_forward_pass_changes_are_refused_and_restored() -> None:
    """An embedding with max_norm renormalises exactly the rows that a record has: without noise, in the weights."""
    embed = nn.Embedding(5, 2, max_norm=0.1)
    before = embed.weight.detach().clone()
    with pytest.raises(UnsupportedLayer, match="drop max_norm"):
        probe(embed, loss, torch.randint(0, 2, (4, 3)))
    assert torch.equal(embed.weight, before)


class Backwards(nn.Module):
    """Each row sees the rows after it: spoiling the first row alone would show nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(0).cumsum(0).flip(0)


def test_mixing_in_either_direction_is_refused() -> None:
    with pytest.raises(UnsupportedLayer, match="depends on another"):
        probe(nn.Sequential(nn.Linear(3, 3), Backwards()), loss, torch.randn(4, 3))


def test_losses_that_say_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"made-up.*example="):
        probe(nn.Linear(3, 1), lambda m, b: (m(b) * torch.nan).squeeze(1), torch.randn(4, 3))
    bce = torch.nn.functional.binary_cross_entropy
    with pytest.raises(ConfigError, match=r"between 0 and 1.*example="):
        probe(nn.Linear(3, 3), lambda m, b: bce(torch.sigmoid(m(b)), b, reduction="none").mean(1), torch.randn(4, 3))


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum, lambda x: x, lambda x: x.mean(1, keepdim=True)])
def test_losses_must_be_one_per_example(reduce: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ConfigError, match='reduction="none"'):
        probe(nn.Linear(3, 2), lambda m, b: reduce(m(b)), torch.randn(4, 3))


def test_good_models_pass_and_randomness_is_untouched() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 1))
    before = torch.get_rng_state()
    probe(model, loss, torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
