"""Convolutions over one or two dimensions, with any stride, padding, dilation and number of groups.

Activations stay in the layout they come in: nothing here converts a channels_last tensor as a whole. The package names
the sources of the formulas.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.gradients.base import at_least_float32
from halfsilver.privacy.gradients.book.conv.gram import Gram, gram_is_small
from halfsilver.privacy.gradients.book.conv.lines import lines, patches
from halfsilver.privacy.gradients.book.conv.strided import strided
from halfsilver.privacy.gradients.book.conv.ways import Products, Reordered, grouped
from halfsilver.privacy.gradients.book.example_gradients import ExampleGradients, Materialised
from halfsilver.privacy.gradients.book.tape import Tape, Unchanged, detached
from halfsilver.privacy.gradients.book.tune import fastest

# Numbers of materialised gradients that may exist at once: 256 MB in float32.
_LARGEST = 2**26


def conv(module: nn.Conv1d | nn.Conv2d, tape: Tape, input: Tensor) -> Tensor:
    if input.dim() != module.weight.dim():
        raise UnsupportedLayer(
            f"{type(module).__name__} got a tensor of shape {tuple(input.shape)}, without a batch dimension. "
            "Use backend='vmap'."
        )
    x, padding = _padded(module, input)
    kept, weight, bias = Unchanged(x), module.weight, module.bias

    def record(g: Tensor) -> None:
        # Where autocast made the output bfloat16, it saw the input so as well: the products may be taken in it.
        if g.dtype != torch.bfloat16 or weight.dtype != torch.float32:
            g = at_least_float32(g)
        tape.add(weight, lambda: _weight(module, kept.get().to(g.dtype), g, padding))
        tape.add(bias, lambda: Materialised(at_least_float32(g).flatten(2).sum(2)))

    return tape.tap(_forward(module, x, padding), record)


def _forward(module: nn.Conv1d | nn.Conv2d, x: Tensor, padding: tuple[int, ...]) -> Tensor:
    weight, bias = module.weight.detach(), detached(module.bias)
    if max(module.stride) > 1 == max(module.dilation) == module.groups:
        return strided(x, weight, bias, module.stride, padding)
    forward = F.conv1d if isinstance(module, nn.Conv1d) else F.conv2d
    return forward(x, weight, bias, module.stride, padding, module.dilation, module.groups)


def _padded(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input and the zeros to put on both sides; padding of any other kind is made part of the input."""
    sides = module._reversed_padding_repeated_twice[::-1]  # (after, before) for each dimension, first dimension first
    before, after = tuple(sides[1::2]), tuple(sides[::2])
    if module.padding_mode == "zeros" and before == after:
        return x, before
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, module._reversed_padding_repeated_twice, mode=mode), (0,) * len(before)


def _weight(module: nn.Conv1d | nn.Conv2d, x: Tensor, g: Tensor, padding: tuple[int, ...]) -> ExampleGradients:
    products = Products.of(module, x, g, padding)
    layout = "last" if x.stride(1) == 1 else "first"
    key = ("conv", x.dtype, tuple(x.shape), tuple(module.weight.shape), products.geometry, module.groups, layout)
    return fastest(key, weight_ways(products, len(x), module.weight.shape))


def weight_ways(products: Products, examples: int, shape: torch.Size) -> dict[str, Callable[[], ExampleGradients]]:
    """All ways to hold the weight's gradients that are worth a trial at these shapes.

    They hold float32 or more, so that norm and sum read the same numbers at that precision.
    """
    small = gram_is_small(products)

    def precise() -> Products:
        return products.to(torch.promote_types(products.g.dtype, torch.float32))

    ways: dict[str, Callable[[], ExampleGradients]] = {}
    if not small or examples * shape.numel() <= _LARGEST:
        ways["lines"] = lambda: Reordered(_by_example(at_least_float32(lines(products)), examples), restore)
        ways["patches"] = lambda: Reordered(_by_example(at_least_float32(patches(products))[None], examples), restore)
        ways["grouped"] = lambda: Materialised(grouped(precise()).reshape(examples, *shape))
    if small:
        ways["gram"] = lambda: Gram(precise(), examples, shape)

    def restore(parts: Tensor) -> Tensor:
        """From (taps, n, out, strips, width, in) to (n, out, in, height, width); there is one tap with all strips."""
        parts = parts.view(*parts.shape[:2], shape[0], -1, products.geometry.kernel[1], shape[1])
        return parts.permute(1, 2, 5, 0, 3, 4).reshape(-1, *shape)

    return ways


def _by_example(parts: Tensor, examples: int) -> Tensor:
    """[taps, examples, numbers] from [taps, rows, out, numbers]: all groups of an example together."""
    return parts.view(len(parts), examples, -1)
