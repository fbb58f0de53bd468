"""The networks of the speed benchmark, in plain PyTorch: those of the paper, and some that only it needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfsilver.tasks.networks import LanguageModel, Recurrent, cifar_cnn, emnist_cnn

__all__ = ["GPT", "Block", "LanguageModel", "LoopLSTM", "Recurrent", "cifar_cnn", "copy_parameters", "emnist_cnn"]


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
