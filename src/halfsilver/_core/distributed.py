"""The processes that train together, and how they agree.

Only numbers and JSON travel between them: torch's own object collectives unpickle what they receive.
"""

from __future__ import annotations

import builtins
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from halfsilver.errors import ConfigError, HalfsilverError

T = TypeVar("T")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class World:
    """The ranks of torch's default process group; a process alone is a world of size 1, where nothing is ever sent.

    Every method must be called on all ranks. What goes wrong on one rank is then raised on all of them, as the same
    type with the same message, so that none is left waiting.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None

    @classmethod
    def current(cls, device: torch.device) -> World:
        """The default process group if there is one; `device` is where its backend finds the tensors."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), device)
        return cls()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone writes the ledger and the run folder."""
        return self.rank == 0

    def from_lead(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, which alone calls it, as JSON carries it; or the error that it raises."""
        if self.size == 1:
            return make()
        made: Any = None
        error, text = None, ""
        if self.leads:
            try:
                made = make()
                text = json.dumps({"value": made})
            except Exception as raised:
                error, text = raised, json.dumps({"error": _described(raised)})
        told = json.loads(self._send(0, text))
        if "error" in told:
            raise error or _rebuilt(*told["error"])
        value: T = made if self.leads else told["value"]
        return value

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the body on every rank, and let all of them fail if one does. No collective may lie in the body."""
        error = None
        try:
            yield
        except Exception as raised:
            if self.size == 1:
                raise
            error = raised
        if self.size > 1:
            self._raise_first(error)

    def _raise_first(self, error: Exception | None) -> None:
        failed = self._tensor(self.size if error is None else self.rank)
        dist.all_reduce(failed, dist.ReduceOp.MIN)
        first = int(failed)
        if first < self.size:
            told = json.loads(self._send(first, json.dumps(_described(error))))
            raise error if error is not None and first == self.rank else _rebuilt(*told)

    def require_same(self, name: str, value: Any, hint: str) -> None:
        """Refuse to go on unless `value`, which JSON can hold, is the same on every rank. The message shows none."""
        if self.size == 1:
            return
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
        number = int.from_bytes(digest[:8], "big") >> 1
        extremes = self._tensor(number, -number)
        dist.all_reduce(extremes, dist.ReduceOp.MIN)
        if int(extremes[0]) != -int(extremes[1]):
            raise ConfigError(f"Expected {name} to be the same on all {self.size} ranks. {hint}")

    def require_replicas(self, tensors: Sequence[Tensor]) -> None:
        """Refuse to go on with ranks that have drifted apart, by a checksum of the bits of their `tensors`."""
        hint = (
            "They drift apart where public gradients are rounded differently: use machines and libraries of one kind."
        )
        self.require_same("the parameters", _checksum(tensors) if self.size > 1 else [], hint)

    @torch.no_grad()
    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Give all ranks the values that rank 0 has in `tensors`."""
        if self.size > 1:
            for t in tensors:
                sent = t.detach().to(self.device).contiguous()
                dist.broadcast(sent, 0)
                t.copy_(sent)

    def tensors_from_lead(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The named tensors of rank 0, on the CPU of every rank; those of other ranks are not looked at."""
        if self.size == 1:
            return dict(tensors)
        kinds = self.from_lead(
            lambda: {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in tensors.items()}
        )
        made = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (kind, *shape) in kinds.items()}
        found = {name: tensors[name].cpu() if self.leads else t for name, t in made.items()}
        self.spread(list(found.values()))
        return found

    def own_seed(self, seed: int) -> int:
        """A seed for this rank: `seed` itself on rank 0, unrelated ones on the others."""
        if self.leads:
            return seed
        return int.from_bytes(hashlib.sha256(f"{seed} {self.rank}".encode()).digest()[:8], "big") >> 1

    def largest(self, value: float) -> float:
        """The largest `value` of all ranks."""
        if self.size == 1:
            return value
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def total(self, value: float) -> float:
        """The sum of `value` over the ranks, with the same rounding on each."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    def _tensor(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _send(self, source: int, text: str) -> str:
        data = torch.tensor(list(text.encode()) if self.rank == source else [], dtype=torch.uint8, device=self.device)
        length = self._tensor(len(data))
        dist.broadcast(length, source)
        if self.rank != source:
            data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        dist.broadcast(data, source)
        return bytes(data.tolist()).decode()


def _checksum(tensors: Sequence[Tensor]) -> list[int]:
    """One number for the bits of each tensor, that another value of any single entry would change."""
    flat = (t.detach().contiguous().reshape(-1) for t in tensors)
    return [int(t.view(_BITS[t.element_size()]).sum(dtype=torch.int64)) for t in flat]


def _described(error: Exception | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def _rebuilt(name: str, message: str) -> Exception:
    """The error of another rank: of the same type if it is one of ours or Python's own."""
    ours = {kind.__name__: kind for kind in HalfsilverError.__subclasses__()}
    kind = ours.get(name) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        error = kind.__new__(kind)  # past any __init__ that asks for other arguments
        error.args = (message,)
        return error
    return RuntimeError(f"{name}: {message}")
