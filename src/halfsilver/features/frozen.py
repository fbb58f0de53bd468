"""`Frozen`: features from the layers of a network that is not trained any more."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfsilver._core.model_state import untouched
from halfsilver._core.tensors import Batch, batch_leaves, map_batch
from halfsilver.errors import ConfigError, require
from halfsilver.features.base import View, as_is, check_views, name_of, over_views


@dataclass(frozen=True, eq=False)
class Frozen:
    """Features of rows from named layers of a torch module, in eval mode.

    For views v_1 .. v_m of a record, the features are ``mean_j phi(v_j(x))``, where phi joins the outputs of the
    layers. Outputs with height and width are averaged over the cells of a grid. Outputs of two dimensions are taken as
    they are, others are flattened.

    Guarantee: in eval mode a batch norm uses its running statistics and dropout does nothing, so features of a record
    depend on that record and on the module only. Train the module on public rows, or use one that is published. The map
    holds a copy of the module. Later changes of the module do not change the features, and what the module writes into
    itself in a pass is undone.

    Args:
        model: Any torch module. It is called with a tensor as it is, with the entries of a tuple as arguments, and with
            those of a dict as keyword arguments.
        layers: Names of submodules as in ``model.named_modules()``; "" is the module itself. Default its own output.
            Layers of several depths are often better than the last one.
        views: Functions of rows whose features are averaged for each record, before any clip, so they cost no privacy.
            Default only the record itself. ``(as_is, flipped)`` suits images of objects. A view may also scale the
            rows, if the module expects that.
        grid: Cells per side to which an output with height and width is averaged, at least 1. Default 2.
        rows: How many rows a pass has, at least 1. Default 256. Lower it if memory is short.

    Raises:
        ConfigError: If an argument is out of range, or the module has no layer of a name.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
        >>> images = torch.randn(6, 3, 8, 8)
        >>> logits = model(images)
        >>> map = Frozen(model, layers=["2", ""], views=[as_is, lambda x: x.flip(-1)]).fit(images)
        >>> map.transform(images).shape
        torch.Size([6, 42])
    """

    model: nn.Module
    layers: Sequence[str] = ("",)
    views: Sequence[View] = (as_is,)
    grid: int = 2
    rows: int = 256

    def __post_init__(self) -> None:
        known = {name for name, _ in self.model.named_modules()}
        missing = [name for name in self.layers if name not in known]
        require(not missing, "layers", missing, f"to be names of {type(self.model).__name__}.named_modules()")
        require(len(self.layers) > 0, "layers", self.layers, "to name at least one layer")
        require(self.grid >= 1, "grid", self.grid, "at least 1")
        require(self.rows >= 1, "rows", self.rows, "at least 1")
        check_views(tuple(self.views))

    def fit(self, public: Batch = None) -> FrozenMap:
        """Copy the module.

        Args:
            public: Not needed, because the module is trained already. Other features take public rows here. Default
                None.

        Returns:
            The map, with a copy of the module in eval mode.
        """
        model = copy.deepcopy(self.model).eval().requires_grad_(False)
        layers, views = tuple(self.layers), tuple(self.views)
        return FrozenMap(model=model, layers=layers, views=views, grid=self.grid, rows=self.rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class FrozenMap:
    """The map that `Frozen` gives."""

    model: nn.Module
    layers: tuple[str, ...]
    views: tuple[View, ...]
    grid: int
    rows: int

    def transform(self, x: Batch) -> Tensor:
        with untouched(self.model):
            return over_views(self._features, x, self.views, self.rows)

    def state(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def about(self) -> Mapping[str, Any]:
        views = [*map(name_of, self.views)]
        return {"kind": "Frozen", "model": str(self.model), "layers": self.layers, "views": views, "grid": self.grid}

    @torch.no_grad()
    def _features(self, x: Batch) -> Tensor:
        found: dict[str, Tensor] = {}
        here = batch_leaves(x)[0].device  # the features are where the rows are, whichever device the module is on
        device = next((t.device for t in (*self.model.parameters(), *self.model.buffers())), here)
        hooks = [self._listen(name, found) for name in self.layers]
        try:
            _called(self.model, map_batch(lambda t: t.to(device), x))
        finally:
            for hook in hooks:
                hook.remove()
        missing = [name for name in self.layers if name not in found]
        require(not missing, "layers", missing, "to be called by the module's forward")
        return torch.cat([found[name] for name in self.layers], 1).to(here)

    def _listen(self, name: str, found: dict[str, Tensor]) -> torch.utils.hooks.RemovableHandle:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() < 2:
                raise ConfigError(f"Expected layer {name!r} to return a tensor [N, ...] of real numbers. Name another.")
            found[name] = _pooled(output, self.grid)  # at once: a later layer may write into it

        return self.model.get_submodule(name).register_forward_hook(hook)


def _called(model: nn.Module, x: Batch) -> None:
    if isinstance(x, dict):
        model(**x)
    elif isinstance(x, Tensor):
        model(x)
    else:
        model(*batch_leaves(x))


def _pooled(output: Tensor, grid: int) -> Tensor:
    output = functional.adaptive_avg_pool2d(output, grid) if output.dim() == 4 else output
    return output.flatten(1).clone()
