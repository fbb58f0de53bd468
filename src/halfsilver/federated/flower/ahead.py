"""The public gradient of a round, computed while the nodes train."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

from halfsilver._core.tensors import Tensors, trainable
from halfsilver.mirror import PublicLoss


@final
class Ahead(PublicLoss):
    """A public loss whose gradient at the model's own parameters can be begun early.

    The values are those of the loss it is made from. Between `begin` and `wait` nothing else may use the model. A
    server that waits for its nodes does not.
    """

    def __init__(self, public: PublicLoss) -> None:
        vars(self).update(vars(public))
        self._public, self._thread = public, ThreadPoolExecutor(1, thread_name_prefix="public-gradient")
        self._begun: tuple[int, Future[Tensors]] | None = None

    def begin(self, step: int) -> None:
        self._taken(None)
        self._begun = step, self._thread.submit(self._public.gradient, None, step=step)

    def wait(self) -> None:
        """Until the model is no longer in use. A map may not ask for the gradient, and the optimizer steps then."""
        if self._begun is not None:
            self._begun[1].exception()

    def gradient(self, params: Tensors | None = None, *, step: int | None = None) -> Tensors:
        live = params is None or all(a is b for a, b in zip(params, trainable(self.model), strict=True))
        begun = self._taken(step)
        return begun if live and begun is not None else self._public.gradient(params, step=step)

    def _taken(self, step: int | None) -> Tensors | None:
        """What was begun for this step, once; any other is waited for too, as it has the model in use."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        value = begun[1].result()
        return value if begun[0] == step else None
