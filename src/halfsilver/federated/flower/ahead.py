"""The public gradient of a round, computed while the nodes train."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, final

from torch import nn

from halfsilver._core.tensors import Tensors, trainable
from halfsilver.mirror import PublicLoss


@final
class Ahead(PublicLoss):
    """A public loss whose gradient at the current parameters can be computed in the background.

    Its values are those of the loss it wraps. Between `begin` and `wait` nothing else may use the model, which holds
    for a server that waits for its nodes.

    Args:
        public: The public loss.
    """

    def __init__(self, public: PublicLoss) -> None:
        vars(self).update(vars(public))
        self.wraps, self._thread = public, ThreadPoolExecutor(1, thread_name_prefix="public-gradient")
        self._begun: tuple[int, Future[Tensors]] | None = None

    def on(self, model: nn.Module) -> Self:
        """The same around the loss of another model.

        Args:
            model: The model that it calls.
        """
        return type(self)(self.wraps.on(model))

    def begin(self, step: int) -> None:
        """Start to compute the gradient of one step in a thread.

        Args:
            step: The step whose public batch is used.
        """
        self._taken(None)
        self._begun = step, self._thread.submit(self.wraps.gradient, None, step=step)

    def wait(self) -> None:
        """Wait until the model is no longer in use, because the optimizer may step without asking for the gradient."""
        if self._begun is not None:
            self._begun[1].exception()

    def gradient(self, params: Tensors | None = None, *, step: int | None = None) -> Tensors:
        """The gradient of one step: the one that was begun, if it fits, else a new one.

        Args:
            params: Where to compute it. Default None, which means at the model's own parameters.
            step: The step whose public batch is used. Default None, which uses all public rows.

        Returns:
            One tensor per trainable parameter.
        """
        live = params is None or all(a is b for a, b in zip(params, trainable(self.model), strict=True))
        begun = self._taken(step)
        return begun if live and begun is not None else self.wraps.gradient(params, step=step)

    def _taken(self, step: int | None) -> Tensors | None:
        """What was begun for this step, once; any other is waited for too, as it has the model in use."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        value = begun[1].result()
        return value if begun[0] == step else None
