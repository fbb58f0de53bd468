"""`fold_batch_norm`: a network that was pretrained with batch norm, as one that can be trained privately."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import fx, nn

from halfsilver.errors import UnsupportedLayer

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def fold_batch_norm(model: nn.Module) -> nn.Module:
    """Return a copy of the model in which each batch norm is part of the convolution or dense layer before it.

    In eval mode a batch norm is an affine map with constants: ``y = gamma (x - mean) / sqrt(var + eps) + beta``. After
    a layer with weights W and bias b, both together are one layer with the weights ``s W`` and the bias
    ``s (b - mean) + beta``, where ``s = gamma / sqrt(var + eps)`` for each channel. The copy computes the same function
    as the model in eval mode, up to rounding. It has no batch norm, which would mix the records of a batch, so all its
    weights can be trained privately. Nothing private is involved.

    Args:
        model: A network whose batch norms directly follow an ``nn.Conv*d``, or an ``nn.Linear`` on vectors, that has no
            other use. It is not changed. `torch.fx` must be able to trace it.

    Returns:
        The copy, in eval mode. Where a batch norm was, it has an ``nn.Identity``, so names of other modules stay.
        Weights are trainable where those of the layer were.

    Raises:
        UnsupportedLayer: If a batch norm does not directly follow such a layer, has no running statistics, or if the
            model cannot be traced.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        >>> folded = fold_batch_norm(model)
        >>> folded[1], folded[0].bias.shape
        (Identity(), torch.Size([4]))

    References:
        Jacob et al., *Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference*,
        2017, arXiv:1712.05877, section 3.2
    """
    folded = copy.deepcopy(model).eval()
    pairs = _pairs(folded)
    left = sorted({name for name, m in folded.named_modules() if isinstance(m, _NORMS)} - {norm for _, norm in pairs})
    if left:
        raise UnsupportedLayer(
            f"The batch norm {left[0]!r} does not directly follow a convolution or dense layer that has no other use. "
            "Move it there, or use nn.GroupNorm, which needs no folding."
        )
    for layer, norm in pairs:
        _fold(folded.get_submodule(layer), folded.get_submodule(norm), norm)
        parent, _, last = norm.rpartition(".")
        setattr(folded.get_submodule(parent), last, nn.Identity())
    return folded


def _pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Names of layers and of the batch norms that are all that follows them; each is called once."""
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:
        raise UnsupportedLayer(
            f"torch.fx cannot trace the model ({type(error).__name__}: {error}). Fold the parts that it can trace."
        ) from error
    calls = [node for node in graph.nodes if node.op == "call_module"]
    times = Counter(node.target for node in calls)
    found = []
    for node in calls:
        before = node.args[0] if node.args else None
        if isinstance(model.get_submodule(node.target), _NORMS) and isinstance(before, fx.Node):
            layer = model.get_submodule(before.target) if before.op == "call_module" else None  # type: ignore[arg-type]
            alone = len(before.users) == 1 and times[node.target] == 1 and times[before.target] == 1
            if isinstance(layer, _LAYERS) and alone:
                found.append((str(before.target), str(node.target)))
    return found


@torch.no_grad()
def _fold(layer: Any, norm: Any, name: str) -> None:
    if norm.running_mean is None:
        raise UnsupportedLayer(f"The batch norm {name!r} has no running statistics: set track_running_stats.")
    weight, trains = layer.weight, layer.weight.requires_grad
    scale = (norm.running_var + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight
    bias = (0 if layer.bias is None else layer.bias) - norm.running_mean
    bias = bias * scale if norm.bias is None else bias * scale + norm.bias
    weight.copy_(weight * scale.view(-1, *[1] * (weight.dim() - 1)))  # in place keeps the layout in memory
    layer.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=trains)
