"""The networks of the speed benchmark, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Recurrent = Callable[..., nn.Module]  # nn.LSTM, or a class with its arguments and parameter names


def cifar_cnn() -> nn.Module:
    """The paper's CIFAR-10 network: three pairs of 3x3 convolutions, each with a pool, and two dense layers."""
    layers: list[nn.Module] = []
    width = 3
    for channels in (32, 64, 128):
        for inputs in (width, channels):
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        width = channels
    head = [nn.Flatten(), nn.Linear(128 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers, *head)


def emnist_cnn() -> nn.Module:
    """The paper's EMNIST network, as in examples/emnist.py."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 6 * 6, 32), nn.ReLU(), nn.Linear(32, 47),
    )  # fmt: skip


class LoopLSTM(nn.LSTM):
    """nn.LSTM written out in elementary operations, because torch.func has no rule for the fused kernel."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        for layer in range(self.num_layers):
            x = self._layer(x, *(getattr(self, f"{kind}_l{layer}") for kind in _LSTM_PARAMETERS))
        return x, None

    def _layer(self, x: Tensor, w_in: Tensor, w_rec: Tensor, b_in: Tensor, b_rec: Tensor) -> Tensor:
        projected = functional.linear(x, w_in, b_in + b_rec)
        hidden = cell = x.new_zeros(x.shape[0], self.hidden_size)
        outputs = []
        for step in projected.unbind(1):
            i, f, g, o = (step + functional.linear(hidden, w_rec)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, 1)


_LSTM_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class LanguageModel(nn.Module):
    """Embedding, LSTM, and one or more dense layers up to the vocabulary."""

    def __init__(self, words: int, width: int, hidden: int, layers: int, recurrent: Recurrent) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = recurrent(width, hidden, num_layers=layers, batch_first=True)
        between: list[nn.Module] = [] if hidden == width else [nn.Linear(hidden, width)]
        self.head = nn.Sequential(*between, nn.Linear(width, words))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer layer, normalised before attention and before the dense part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.qkv(self.norm1(x))))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]

    def _attend(self, qkv: Tensor) -> Tensor:
        rows, tokens, _ = qkv.shape
        q, k, v = (t.reshape(rows, tokens, self.heads, -1).transpose(1, 2) for t in qkv.chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(rows, tokens, -1)


class GPT(nn.Module):
    """A decoder-only transformer with learned positions; input and output embeddings are not tied."""

    def __init__(self, words: int, width: int, heads: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        # Repeated for the batch: per-example tools expect the example on dimension 0 of every layer's input.
        places = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        x = self.words(tokens) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def copy_parameters(source: nn.Module, target: Any) -> None:
    """By name: stand-ins for nn.LSTM keep its parameter names, though not always its state dict."""
    wanted = dict(source.named_parameters())
    with torch.no_grad():
        for name, p in target.named_parameters():
            p.copy_(wanted.pop(name))
    assert not wanted, f"parameters that {type(target).__name__} lacks: {sorted(wanted)}"
