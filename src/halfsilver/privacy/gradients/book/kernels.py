"""Which kernel serves which module. A new kernel is one function in a file of its own and one line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from halfsilver.privacy.gradients.book.any_module import AnyModule
from halfsilver.privacy.gradients.book.conv.layer import conv
from halfsilver.privacy.gradients.book.dense import embedding, linear
from halfsilver.privacy.gradients.book.norms import group_norm, layer_norm, rms_norm
from halfsilver.privacy.gradients.book.recurrent.elman import elman
from halfsilver.privacy.gradients.book.recurrent.gru import gru
from halfsilver.privacy.gradients.book.recurrent.lstm import lstm

Kernel = Callable[..., Any]  # (module, tape, *what forward takes) -> what forward returns

KERNELS: dict[type[nn.Module], Kernel] = {
    nn.Linear: linear,
    nn.Embedding: embedding,
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    nn.LSTM: lstm,
    nn.GRU: gru,
    nn.RNN: elman,
}


def kernels_for(model: nn.Module) -> dict[nn.Module, Kernel]:
    """A kernel for every module that owns trainable parameters, or for the smallest module around it."""
    return dict(_walk("", model))


def _walk(name: str, module: nn.Module) -> Iterator[tuple[nn.Module, Kernel]]:
    kernel = _kernel(module)
    if kernel is not None:
        yield module, kernel
    elif _owns_parameters(module) or hasattr(module, "parametrizations"):
        yield module, AnyModule(name, module)
    else:
        for child_name, child in module.named_children():
            yield from _walk(f"{name}.{child_name}".lstrip("."), child)


def _kernel(module: nn.Module) -> Kernel | None:
    """The kernel of the class whose forward method this module runs, if its parameters are that class's own."""
    if "forward" in module.__dict__ or next(module.children(), None) is not None:
        return None
    for base, kernel in KERNELS.items():
        if isinstance(module, base) and _same_code(type(module), base):
            return kernel if _owns_parameters(module) and _plain(module) else None
    return None


def _same_code(kind: type[nn.Module], base: type[nn.Module]) -> bool:
    """Convolutions run their forward method through one more, which a subclass may override instead."""
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in ("forward", "_conv_forward"))


def _owns_parameters(module: nn.Module) -> bool:
    """Itself, or in a container of parameters, which is never called."""
    own = [module, *(child for child in module.children() if isinstance(child, nn.ParameterDict | nn.ParameterList))]
    return any(p.requires_grad for owner in own for p in owner.parameters(recurse=False))


def _plain(module: nn.Module) -> bool:
    """Whether nothing rewrites the module's weights before it runs, as weight_norm's older form does."""
    return not any(name.endswith(("_g", "_v", "_orig")) for name, _ in module.named_parameters(recurse=False))
