"""The networks of the benchmark as JAX functions of PyTorch's parameters, by PyTorch's names and layouts.

A function takes (parameters, inputs) with the example on dimension 0; images have their channels last, as XLA likes.
JAX is loaded by name: it need not be installed, and has no part in the types of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from torch import nn

from benchmarks.speed.networks import GPT, LanguageModel

Forward = Callable[[dict[str, Any], Any], Any]
Layer = Callable[[dict[str, Any], Any], Any]


def forward_of(model: nn.Module) -> Forward:
    """The forward pass of `model`; NotImplementedError where there is none."""
    if isinstance(model, LanguageModel):
        return _language_model(model)
    if isinstance(model, GPT):
        return _gpt(model)
    layers = list(_layers(model, ""))

    def forward(p: dict[str, Any], x: Any) -> Any:
        for layer in layers:
            x = layer(p, x)
        return x

    return forward


def _layers(module: nn.Module, name: str) -> Iterator[Layer]:
    """The layers of a (nested) nn.Sequential, with the prefix of their parameters."""
    lax, jnp, jax_nn = import_module("jax.lax"), import_module("jax.numpy"), import_module("jax.nn")
    if isinstance(module, nn.Sequential):
        for key, child in module.named_children():
            yield from _layers(child, f"{name}{key}.")
    elif isinstance(module, nn.Linear):
        yield lambda p, x: _dense(p, name, x)
    elif isinstance(module, nn.Conv2d):
        yield lambda p, x: _convolution(module, p, name, x)
    elif isinstance(module, nn.ReLU):
        yield lambda p, x: jax_nn.relu(x)
    elif isinstance(module, nn.GELU):
        yield lambda p, x: jax_nn.gelu(x, approximate=False)
    elif isinstance(module, nn.MaxPool2d):
        size = (1, module.kernel_size, module.kernel_size, 1)
        yield lambda p, x: lax.reduce_window(x, -jnp.inf, lax.max, size, size, "VALID")
    elif isinstance(module, nn.Flatten):  # in PyTorch's order, channels before rows and columns
        yield lambda p, x: jnp.moveaxis(x, -1, 1).reshape(len(x), -1)
    else:
        raise NotImplementedError(f"no JAX version of {type(module).__name__}")


def _dense(p: dict[str, Any], name: str, x: Any) -> Any:
    y = x @ p[f"{name}weight"].T
    return y + p[f"{name}bias"] if f"{name}bias" in p else y


def _convolution(module: nn.Conv2d, p: dict[str, Any], name: str, x: Any) -> Any:
    lax = import_module("jax.lax")
    padding = [(int(side), int(side)) for side in module.padding]
    order = ("NHWC", "OIHW", "NHWC")
    y = lax.conv_general_dilated(x, p[f"{name}weight"], module.stride, padding, dimension_numbers=order)
    return y + p[f"{name}bias"]


def _language_model(model: LanguageModel) -> Forward:
    head = list(_layers(model.head, "head."))

    def forward(p: dict[str, Any], tokens: Any) -> Any:
        x = p["embedding.weight"][tokens]
        for layer in range(int(model.lstm.num_layers)):  # type: ignore[arg-type]
            x = _lstm_layer(p, layer, x)
        for dense in head:
            x = dense(p, x)
        return x

    return forward


def _lstm_layer(p: dict[str, Any], layer: int, x: Any) -> Any:
    lax, jnp, jax_nn = import_module("jax.lax"), import_module("jax.numpy"), import_module("jax.nn")
    w_in, w_rec, b_in, b_rec = (p[f"lstm.{k}_l{layer}"] for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    projected = jnp.moveaxis(x @ w_in.T + b_in + b_rec, 1, 0)

    def step(carry: tuple[Any, Any], now: Any) -> tuple[tuple[Any, Any], Any]:
        hidden, cell = carry
        i, f, g, o = jnp.split(now + hidden @ w_rec.T, 4, axis=-1)
        cell = jax_nn.sigmoid(f) * cell + jax_nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax_nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((len(x), w_rec.shape[1]), x.dtype)
    return jnp.moveaxis(lax.scan(step, (zeros, zeros), projected)[1], 0, 1)


def _gpt(model: GPT) -> Forward:
    blocks = [f"blocks.{key}." for key, _ in model.blocks.named_children()]
    heads = int(model.blocks[0].heads)  # type: ignore[arg-type]

    def forward(p: dict[str, Any], tokens: Any) -> Any:
        x = p["words.weight"][tokens] + p["positions.weight"][: tokens.shape[1]]
        for name in blocks:
            x = _block(p, name, x, heads)
        return _dense(p, "head.", _norm(p, "norm.", x))

    return forward


def _block(p: dict[str, Any], name: str, x: Any, heads: int) -> Any:
    jax_nn, jnp = import_module("jax.nn"), import_module("jax.numpy")
    rows, tokens, width = x.shape
    qkv = jnp.split(_dense(p, f"{name}qkv.", _norm(p, f"{name}norm1.", x)), 3, axis=-1)
    q, k, v = (t.reshape(rows, tokens, heads, -1) for t in qkv)
    mixed = jax_nn.dot_product_attention(q, k, v, is_causal=True).reshape(rows, tokens, width)
    x = x + _dense(p, f"{name}out.", mixed)
    inner = jax_nn.gelu(_dense(p, f"{name}mlp.0.", _norm(p, f"{name}norm2.", x)), approximate=False)
    return x + _dense(p, f"{name}mlp.2.", inner)


def _norm(p: dict[str, Any], name: str, x: Any) -> Any:
    jnp, lax = import_module("jax.numpy"), import_module("jax.lax")
    centred = x - x.mean(-1, keepdims=True)
    scale = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return centred * scale * p[f"{name}weight"] + p[f"{name}bias"]
