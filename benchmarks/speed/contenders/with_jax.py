"""JAX Privacy: `clipped_grad`, its Gaussian privatizer and the SGD update in one jitted function.

Its micro-batch size is chosen by trial: the whole batch, and the divisors of the batch next to 64 and to 16, are
compiled and timed for a step each; the fastest takes part. Parameters are donated: the update works in place.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.speed.contenders.base import NOISE_MULTIPLIER, Named, Options
from benchmarks.speed.contenders.jax_networks import Forward, forward_of
from benchmarks.speed.models import Workload, class_loss, squared_loss, token_loss

_SIZES = (64, 16)


def prepare() -> None:
    """Import, with as many threads as PyTorch has: XLA reads these variables once."""
    threads = torch.get_num_threads()
    os.environ.setdefault("NPROC", str(threads))
    if threads == 1:
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    import_module("jax_privacy.clipping")
    import_module("jax_privacy.noise_addition")


class JaxPrivacy:
    def __init__(self, workload: Workload, model: nn.Module, options: Options) -> None:
        jnp = import_module("jax.numpy")
        self._workload, self._loss = workload, _loss(workload, forward_of(model))
        start = {name: p.detach().numpy() for name, p in model.named_parameters()}
        self._parameters = {name: jnp.array(p) for name, p in start.items()}
        x, y = workload.batch
        x = x.permute(0, 2, 3, 1) if x.dim() == 4 else x
        self._batch = (jnp.array(x.contiguous().numpy()), jnp.array(y.numpy()))
        privatizer = import_module("jax_privacy.noise_addition").gaussian_privatizer
        self._privatizer = privatizer(stddev=NOISE_MULTIPLIER * workload.clip, prng_key=0)
        self._noise_state = self._privatizer.init(self._parameters)
        self._take_step, self._sum, self.detail = self._fastest()
        self._parameters = {name: jnp.array(p) for name, p in start.items()}  # the trials moved them

    def step(self) -> None:
        self._run(self._take_step)

    def clipped_sum(self) -> Named:
        total = import_module("jax").jit(self._sum)(self._parameters, self._batch)
        return {name: torch.from_numpy(import_module("numpy").array(t)) for name, t in total.items()}

    def _run(self, function: Any) -> None:
        found = function(self._parameters, self._noise_state, self._batch)
        self._parameters, self._noise_state = import_module("jax").block_until_ready(found)

    def _fastest(self) -> tuple[Any, Any, str]:
        """Compiled step, clipped sum and name of the micro-batch size that takes a step in the least time."""
        trials: list[tuple[float, Any, Any, str]] = []
        for size in _candidates(self._workload.rows):
            clipped_grad = import_module("jax_privacy.clipping").clipped_grad
            clipped = clipped_grad(self._loss, l2_clip_norm=self._workload.clip, microbatch_size=size)
            function = self._compiled(clipped)
            started = time.perf_counter()
            self._run(function)
            name = "whole batch" if size is None else f"micro-batches of {size}"
            trials.append((time.perf_counter() - started, function, clipped, name))
        return min(trials, key=lambda trial: trial[0])[1:]

    def _compiled(self, clipped: Any) -> Any:
        jax, scale = import_module("jax"), self._workload.lr / self._workload.rows

        def step(parameters: Any, noise_state: Any, batch: Any) -> Any:
            noisy, noise_state = self._privatizer.update(clipped(parameters, batch), noise_state)
            return jax.tree.map(lambda p, g: p - scale * g, parameters, noisy), noise_state

        given = (self._parameters, self._noise_state, self._batch)
        return jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile()


def _candidates(rows: int) -> list[int | None]:
    """None is the whole batch. JAX Privacy wants micro-batches that divide it."""
    divisors = [k for k in range(1, rows) if rows % k == 0]
    near = {min(divisors, key=lambda k: abs(k - wanted)) for wanted in _SIZES}
    return [None, *sorted(near, reverse=True)]


def _loss(workload: Workload, forward: Forward) -> Any:
    """The workload's loss, for a batch of one example."""
    jax, jnp = import_module("jax"), import_module("jax.numpy")
    if workload.criterion is squared_loss:
        return lambda p, batch: 0.5 * jnp.square(forward(p, batch[0])[:, 0] - batch[1]).sum()
    if workload.criterion not in (class_loss, token_loss):
        raise NotImplementedError("no JAX version of this loss")

    def loss(p: Any, batch: Any) -> Any:
        logits = jax.nn.log_softmax(forward(p, batch[0]))
        return -jnp.take_along_axis(logits, batch[1][..., None], -1).mean()

    return loss
