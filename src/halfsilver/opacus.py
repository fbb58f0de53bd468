"""Mirror maps for an existing Opacus loop: `attach_mirror`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfsilver._core.tensors import Tensors, trainable
from halfsilver.errors import CheckpointCorrupt, ConfigError, MissingExtra, require
from halfsilver.mirror import Clock, MirrorMap, PublicLoss, State, Step
from halfsilver.mirror.base import as_map


def attach_mirror(
    optimizer: Optimizer,
    mirror: MirrorMap,
    public: PublicLoss | None,
    *,
    total_steps: int | None = None,
    steps_per_epoch: float | None = None,
) -> MirrorHandle:
    """Send every update of an Opacus optimizer through a mirror map. The rest of the loop stays as it is.

    Between Opacus's noise and the update, the map replaces each gradient by its direction. This is post-processing, so
    the cost in privacy is the one that Opacus reports. The public gradient has a pass of its own, which leaves the
    state of Opacus and of every random generator as it was.

    Everything before the noise is Opacus's. So these promises of `Trainer` do *not* hold here: noise from the system's
    entropy and on a grid; a clipping margin for rounding; a NaN record that contributes zero; a batch size that is
    declared and not computed from the number of private records; sampling that is the accountant's whatever the loader;
    a ledger that is written before the data are touched, a budget that refuses, and a statement.

    Args:
        optimizer: The optimizer that `make_private` returned. Its loss reduction must be "mean".
        mirror: The mirror map.
        public: The public loss, made with the model that the optimizer trains, before or after `make_private`. None for
            maps that need no public data.
        total_steps: The number of updates of the whole training, at least 1. Default None. Needed by schedules that
            depend on it, such as `cosine`.
        steps_per_epoch: The number of updates per pass over the private data, ``len(data_loader)``; above 0. Default
            None. Needed by schedules in epochs.

    Returns:
        A handle with which to remove the map or to save its state.

    Raises:
        ConfigError: If optimizer, map, schedule and public loss do not fit together. This is tried here, before the
            first private step.
        MissingExtra: If Opacus is not installed.

    Example:
        >>> import torch
        >>> import halfsilver as hs
        >>> from halfsilver.opacus import attach_mirror
        >>> model = torch.nn.Linear(2, 1)
        >>> loss_fn = lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]).square()
        >>> public = hs.PublicLoss(model, loss_fn, (torch.randn(20, 2), torch.randn(20)))
        >>> from opacus.optimizers import DPOptimizer
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> noisy = DPOptimizer(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=20)  # by make_private
        >>> handle = attach_mirror(noisy, hs.FirstOrder(alpha=hs.mirror.constant(0.9)), public)
        >>> handle.remove()

    References:
        - Amid et al. 2022, Public Data-Assisted Mirror Descent for Private Model Training, ICML, arXiv:2112.00193.
        - Yousefpour et al. 2021, Opacus: User-Friendly Differential Privacy Library in PyTorch, arXiv:2109.12298.
    """
    inner = _inner(optimizer)
    loss = public is None or isinstance(public, PublicLoss)
    require(loss, "public", type(public).__name__, "to be PublicLoss(model, loss_fn, public_rows), or None")
    require(total_steps is None or total_steps >= 1, "total_steps", total_steps, "at least 1 or None")
    require(steps_per_epoch is None or steps_per_epoch > 0, "steps_per_epoch", steps_per_epoch, "above 0 or None")
    length = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
    return MirrorHandle(inner, as_map(mirror), None if public is None else _bare(public), length)


@final
class MirrorHandle:
    """A mirror map that is attached to an optimizer, until `remove`. The attribute `step` counts its updates.

    Users do not call this constructor but `attach_mirror`.

    Args:
        optimizer: The torch optimizer.
        mirror: The mirror map.
        public: The public loss, or None.
        length: ``total_steps`` and ``steps_per_epoch``, each possibly None.
    """

    def __init__(
        self, optimizer: Optimizer, mirror: MirrorMap, public: PublicLoss | None, length: Mapping[str, Any]
    ) -> None:
        self.step = 0
        self._optimizer, self._mirror, self._public, self._length = optimizer, mirror, public, length
        params = self._params()
        with _hooks_off(public):
            self._state = mirror.init(params=params, public=public)
        # A rehearsal shows what is wrong with map, schedule or public loss while nothing private has been spent. Its
        # step is 1, because at step 0 a schedule may not ask for the public loss yet.
        self._direction([torch.zeros_like(p) for p in params], params, step=1)
        # Not DPOptimizer.attach_step_hook: there is one such hook, and it is the accountant's.
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Detach the map. Training continues as plain DP-SGD, and model and optimizer keep their state."""
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides model and optimizer.

        Returns:
            The number of updates, and the tensors that the map keeps.
        """
        return {"step": self.step, "mirror": {name: self._state[name] for name in self._mirror.persistent}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            saved: What `state_dict` returned, for the same map and model.

        Raises:
            CheckpointCorrupt: If it is no such state, or belongs to another map or model.
        """
        try:
            step, tensors = int(saved["step"]), dict(saved["mirror"])
            fits = step >= 0 and _shapes(tensors) == _shapes({k: self._state[k] for k in self._mirror.persistent})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointCorrupt(f"This is not the state_dict of a mirror: {error!r}") from error
        if not fits:
            raise CheckpointCorrupt(f"The state belongs to another mirror map or model than {self._mirror!r}.")
        self.step = step
        self._state = self._state | {name: t.to(self._state[name]) for name, t in tensors.items()}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = self._params()
        direction, self._state = self._direction([_released(p) for p in params], params, step=self.step)
        for p, d in zip(params, direction, strict=True):
            p.grad = d
        self.step += 1

    def _direction(self, released: Tensors, params: Tensors, *, step: int) -> tuple[Tensors, State]:
        clock, lr = _Clock(step=step, **self._length), float(self._optimizer.param_groups[0]["lr"])
        with _hooks_off(self._public):
            now = Step(params=params, public=self._public, clock=clock, lr=lr)
            return self._mirror.direction(released, self._state, now)

    def _params(self) -> Tensors:
        """The parameters in the order of the public loss. All must be the optimizer's: only those have noise."""
        held = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        if self._public is None:
            return held
        params = trainable(self._public.model)
        if {id(p) for p in held} != {id(p) for p in params}:
            raise ConfigError(
                "Expected the optimizer to hold exactly the trainable parameters of the public loss. Make PublicLoss "
                "with the model that the optimizer trains, and freeze the parameters that it does not hold."
            )
        return params


@final
class _Clock(Clock):
    """A clock that explains how to give a length, where a schedule asks for one that was not given."""

    def __post_init__(self) -> None:
        """Nothing: the lengths may be missing, and have been checked where they came in."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is None and name in ("total_steps", "steps_per_epoch"):
            raise ConfigError(f"The mirror map's schedule needs {name}: give it with attach_mirror(..., {name}=...).")
        return value


def _inner(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside Opacus's; steps that Opacus skips to save memory never reach it."""
    try:
        from opacus.optimizers import DPOptimizer
    except ImportError as error:
        raise MissingExtra("opacus", "opacus") from error
    if not isinstance(optimizer, DPOptimizer):
        raise ConfigError(
            f"Expected the optimizer that make_private returns, not {type(optimizer).__name__}, whose steps would be "
            "without clipping and noise. Call make_private first."
        )
    hint = "The map combines its gradients with means over public records. Set it in make_private."
    require(optimizer.loss_reduction == "mean", "loss_reduction", optimizer.loss_reduction, "to be 'mean'", hint)
    inner: Optimizer = optimizer.original_optimizer
    if any(isinstance(_owner(hook), MirrorHandle) for hook in inner._optimizer_step_pre_hooks.values()):
        raise ConfigError("This optimizer has a mirror. Call remove() on its handle first, or combine maps with chain.")
    return inner


def _bare(public: PublicLoss) -> PublicLoss:
    """`public` on the module inside Opacus's wrapper: some wrappers compute per-example gradients in their forward."""
    from opacus.grad_sample import AbstractGradSampleModule

    if not isinstance(public.model, AbstractGradSampleModule):
        return public
    bare = copy.copy(public)
    bare.model = public.model._module
    return bare


@contextmanager
def _hooks_off(public: PublicLoss | None) -> Iterator[None]:
    """Take Opacus's hooks off the model of the public loss for this block, whoever put them there.

    A hook that is only disabled still makes torch warn. Silencing that warning would reset Python's record of warnings
    already shown, and those of the private pass would be printed at every step instead of once.
    """
    from opacus.grad_sample import GradSampleHooks

    modules = public.model.modules() if public else ()
    tables = [table for m in modules for table in (m._forward_hooks, m._backward_hooks) if table]
    before = [dict(table) for table in tables]
    try:
        for table, hooks in zip(tables, before, strict=True):
            for key, hook in hooks.items():
                if isinstance(_owner(hook), GradSampleHooks):
                    del table[key]
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


def _owner(hook: Any) -> object:
    """The object whose method `hook` is, also where arguments are bound to it."""
    return getattr(getattr(hook, "func", hook), "__self__", None)


def _released(p: Tensor) -> Tensor:
    if p.grad is None:
        raise ConfigError("Expected a gradient in every parameter. Call optimizer.step() of Opacus after backward().")
    return p.grad


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in tensors.items()}
