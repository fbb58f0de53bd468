"""torch.func: vmap over grad, the whole batch at once where its gradients fit into memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.speed.contenders.base import Named, Options, update
from benchmarks.speed.models import Workload

_MATERIALISED = 300_000_000  # numbers in per-example gradients at once, 1.2 GB


class VmapGrad:
    def __init__(self, workload: Workload, model: nn.Module, options: Options) -> None:
        self._workload, self._model = workload, model
        size = sum(p.numel() for p in model.parameters())
        pieces = -(-workload.rows * size // _MATERIALISED)
        rows = -(-workload.rows // pieces)
        self._pieces = workload.pieces(rows)
        self.detail = "" if pieces == 1 else f"{rows} rows at once"
        self._gradients = vmap(grad(self._loss), in_dims=(None, 0, 0))

    def _loss(self, params: Named, x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(self._model, params, (x[None],))
        return self._workload.criterion(outputs, y[None])[0]

    def step(self) -> None:
        update(self._model, self.clipped_sum(), self._workload.clip, self._workload.rows, self._workload.lr)

    def clipped_sum(self) -> Named:
        params = {name: p.detach() for name, p in self._model.named_parameters()}
        total = {name: torch.zeros_like(p) for name, p in params.items()}
        for x, y in self._pieces:
            with sdpa_kernel(SDPBackend.MATH):  # the fused attention has no batching rule
                gradients = self._gradients(params, x, y)
            self._add_clipped(total, gradients)
        return total

    def _add_clipped(self, total: Named, gradients: Named) -> None:
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factors = (self._workload.clip / norms).clamp(max=1.0)
        for name, g in gradients.items():
            total[name] += torch.einsum("i,i...", factors, g)
