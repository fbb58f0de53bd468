"""FirstOrder: the mirror step to first order, which networks can afford."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import final

from halfsilver._core.tensors import Tensors, lerp
from halfsilver.errors import require, require_numbers
from halfsilver.mirror.base import Mixture, State, Stateless, Step, clip_factor, clip_norm, need_public
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.schedules import Constant, Cosine, Schedule, weight_at


@final
@dataclass(frozen=True)
class FirstOrder(Stateless):
    """Mirror descent to first order: ``alpha * released + (1 - alpha) * grad Psi(theta)``.

    The public gradient is computed on the public batch of the step. Where alpha is 1 it is not computed at all, and
    the step is one of plain DP-SGD. The map costs no privacy, because it sees released and public values only.

    Derivation from the mirror step, for steps i = 1..t with released gradients r_i and learning rates lr_i:

    1. The lazy form of the mirror step, with ``|theta|^2 / 2`` added to Psi to make it strongly convex, is
       ``theta_{t+1} = argmin <sum_i lr_i r_i, theta> + Psi(theta) + |theta|^2 / 2``.
    2. Write Psi as t equal shares, ``Psi(theta) = sum_i Psi(theta) / t``, one for each step.
    3. Replace share i by its tangent at theta_i: up to a constant it is ``<grad Psi(theta_i), theta> / t``.
    4. The objective is now linear plus ``|theta|^2 / 2``, so its minimiser is a plain sum of gradient steps,
       ``theta_{t+1} = - sum_i lr_i (r_i + w_i grad Psi(theta_i))`` with ``w_i = 1 / (t lr_i)``.
    5. Take w_i as a free schedule and let the learning rate absorb the factor 1 + w_i. With ``alpha = 1 / (1 + w)``
       the direction of a step is ``alpha * r + (1 - alpha) * grad Psi(theta)``.

    Step 3 is the only approximation, and step 5 a choice of parameters. Use `Bregman` or `Quadratic` for exact steps
    where the public loss is convex and the model small.

    Args:
        alpha: The share of the released gradient, in [0, 1]: a number, or a schedule such as ``cosine(end=0.8)``.
            Smaller values trust the public data more and let less noise through.
        public_max_norm: The largest norm of the public gradient, above 0, in the unit of the gradient. Default None, no
            limit. Set it where public gradients are much longer than released ones and would dominate the direction.

    Raises:
        ConfigError: If `alpha` or `public_max_norm` is out of range, or when training starts without public data.

    Example:
        >>> import torch
        >>> from halfsilver.mirror import Clock, FirstOrder, PublicLoss, Step
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> public = PublicLoss(model, lambda model, x: model(x).squeeze(1), torch.ones(4, 1))  # its gradient is 1
        >>> step = Step(params=[model.weight], public=public, clock=Clock(step=0, total_steps=1), lr=0.1)
        >>> FirstOrder(0.75).direction([torch.tensor([[5.0]])], {}, step)[0]
        [tensor([[4.]])]

    References:
        Amid et al., *Public Data-Assisted Mirror Descent for Private Model Training*, ICML 2022, arXiv:2112.00193,
        section 5 and appendix on the first-order approximation
        Hazan, *Introduction to Online Convex Optimization*, 2019, arXiv:1909.05207, lemma 5.5 (the lazy form)
    """

    alpha: float | Schedule
    _: KW_ONLY
    public_max_norm: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.alpha):
            require_numbers(alpha=self.alpha)
            require(0 <= self.alpha <= 1, "alpha", self.alpha, "in [0, 1]")
        limit = self.public_max_norm
        require(limit is None or limit > 0, "public_max_norm", limit, "above 0, or None")

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        if self.alpha not in (1, Constant(1.0), Cosine(end=1.0)):
            need_public(public, self)  # now, not after the first private step
        return {}

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        alpha = weight_at(self.alpha, step.clock)
        if alpha == 1.0:
            return released, state
        return lerp(alpha, released, self.public_gradient(step)), state

    def mixture(self, released: Tensors, state: State, step: Step, *, curvature: float) -> Mixture:
        alpha = weight_at(self.alpha, step.clock)
        return Mixture(private=alpha, public=(1 - alpha) * self._clip_factor(step), elementwise=True)

    def _clip_factor(self, step: Step) -> float:
        if self.public_max_norm is None:
            return 1.0
        gradient = need_public(step.public, self).gradient(step.params, step=step.clock.step)
        return clip_factor(gradient, self.public_max_norm)

    def public_gradient(self, step: Step) -> Tensors:
        """The public part of the direction, before its weight.

        Args:
            step: Parameters, public loss and clock of the step.

        Returns:
            The gradient of the step's public batch, clipped to `public_max_norm` if there is one.

        Raises:
            ConfigError: If there is no public loss.
        """
        gradient = need_public(step.public, self).gradient(step.params, step=step.clock.step)
        return gradient if self.public_max_norm is None else clip_norm(gradient, self.public_max_norm)
