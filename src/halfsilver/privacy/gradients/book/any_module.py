"""Any other module: every example gets its own copy of that module's weights, and autograd does the rest.

The copies are views of the same memory until a gradient comes back, [rows, *shape] per weight. This is slow and needs
much memory, but for this module alone. Source: the chain rule, as torch.func.vmap applies it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from halfsilver._core.tensors import Tensors
from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.gradients.book.example_gradients import Materialised
from halfsilver.privacy.gradients.book.tape import Tape

OneExample = Callable[[dict[str, Tensor], Tensors], Tensors]  # (weights, tensors without the example dimension)

_log = logging.getLogger("halfsilver")


@final
class AnyModule:
    """Stands in for `module.forward`, for a module and all below it that no kernel covers."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._forward = module.forward
        self._inside = False
        self._vectorised: bool | None = None
        _log.info("No fast kernel for %s at %r: this module runs on a slower path.", type(module).__name__, name)

    def __call__(self, module: nn.Module, tape: Tape, *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # called by ourselves, one example at a time
            return self._forward(*args, **kwargs)
        given = _Tree((args, kwargs))
        if not given.tensors or any(t.dim() == 0 or len(t) != tape.rows for t in given.tensors):
            raise UnsupportedLayer(
                f"{type(module).__name__} takes a tensor without the example on dimension 0. Use backend='vmap'."
            )
        copies = {n: _copies(p, tape) for n, p in module.named_parameters() if p.requires_grad}
        returned: list[_Tree] = []

        def one(weights: dict[str, Tensor], tensors: Tensors) -> Tensors:
            args, kwargs = given.filled([t.unsqueeze(0) for t in tensors])
            returned.append(_Tree(functional_call(module, weights, args, kwargs)))
            return [t.squeeze(0) for t in returned[-1].tensors]

        self._inside = True
        try:
            tensors = self._over_examples(one, copies, given.tensors)
        finally:
            self._inside = False
        return returned[-1].filled(tensors)

    def _over_examples(self, one: OneExample, copies: dict[str, Tensor], tensors: Tensors) -> Tensors:
        if self._vectorised is None:  # decided by the first call, which is on made-up rows
            self._vectorised = _works(one, copies, tensors)
        if self._vectorised:
            return list(vmap(one, randomness="different")(copies, tensors))
        rows = range(len(tensors[0]))
        each = [one({n: c[i] for n, c in copies.items()}, [t[i] for t in tensors]) for i in rows]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]


class _Tree:
    """Any nesting of tensors and other things, and the same with other tensors."""

    def __init__(self, tree: Any) -> None:
        self._leaves, self._spec = pytree.tree_flatten(tree)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]

    def filled(self, tensors: Tensors) -> Any:
        new = iter(tensors)
        leaves = [next(new) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def _works(one: OneExample, copies: dict[str, Tensor], tensors: Tensors) -> bool:
    """Whether vmap can run a module, and does so without a loop inside an operator, of which torch warns."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("error", message="There is a performance drop", category=UserWarning)
            vmap(one, randomness="different")(copies, tensors)
    except (RuntimeError, NotImplementedError, ValueError, UserWarning):
        return False
    return True


def _copies(parameter: Tensor, tape: Tape) -> Tensor:
    copies = parameter.detach().expand(tape.rows, *parameter.shape)
    return tape.tap(copies, lambda g: tape.add(parameter, lambda: Materialised(g)))
