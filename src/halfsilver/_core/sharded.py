"""Parameters that lie on several ranks: which piece is whose, and how to see the whole model on one rank.

A sharded parameter is a DTensor cut on dimension 0, as FSDP2's `fully_shard` makes them. Nothing is imported from
torch.distributed here before the user has: DTensor alone takes a second.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfsilver._core.distributed import World
from halfsilver.errors import ConfigError

Tensors = list[Tensor]

# Numbers that are copied into one message: large enough for the network, small beside a large model.
_BUCKET = 1 << 24

_COPIES: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def is_sharded(t: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Tensor) -> Tensor:
    """The part of `t` that lies on this rank, sharing its memory: all of it unless it is sharded."""
    found: Tensor = t.detach().to_local() if is_sharded(t) else t.detach()  # type: ignore[attr-defined]
    return found


def full(t: Tensor) -> Tensor:
    """All of `t`, on every rank."""
    found: Tensor = t.detach().full_tensor() if is_sharded(t) else t  # type: ignore[attr-defined]
    return found


def full_on_lead(t: Tensor) -> Tensor:
    """All of `t` on the CPU of rank 0. The others hold a sharded one for a moment only, and get a placeholder."""
    if not is_sharded(t):
        return t
    return full(t).cpu() if World.current(t.device).leads else full(t).new_empty(0)


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank keeps of `whole`, if `like` is sharded and of its shape: the shard that `like` has; else all."""
    if not is_sharded(like) or whole.shape != like.shape:
        return whole
    world, rows = World.current(like.device), local(like).shape[0]
    start = world.rank * math.ceil(like.shape[0] / world.size)
    return _as_shard(whole[start : start + rows].to(like.device, copy=True), like)


def _as_shard(piece: Tensor, like: Any) -> Tensor:
    kind = type(like.detach())
    shard: Tensor = kind.from_local(
        piece.reshape(local(like).shape), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return shard


def refuse_sharded(params: Sequence[Tensor], what: str) -> None:
    if any(map(is_sharded, params)):
        raise ConfigError(
            f"{what} works on the whole vector of parameters and cannot take sharded ones. "
            "Use FirstOrder, or train without fully_shard."
        )


class Pieces:
    """Every parameter cut into one piece a rank. A sharded one is cut as it lies, any other into equal parts.

    Each number of a sum therefore comes together on one rank, which alone adds its noise.
    """

    def __init__(self, params: Sequence[Tensor], world: World) -> None:
        self._params, self._world = list(params), world
        for p in filter(is_sharded, params):
            _check_layout(p, world)
        rows = [p.shape[0] if is_sharded(p) else p.numel() for p in params]
        self._lengths = [
            math.ceil(n / world.size) * (p.numel() // max(n, 1)) for n, p in zip(rows, params, strict=True)
        ]

    def sum(self, tensors: Tensors) -> Tensors:
        """This rank's pieces of the sum of `tensors`, which have the full shapes, over all ranks."""
        if self._world.size == 1:
            return tensors
        pieces: Tensors = []
        for bucket in self._buckets(range(len(tensors))):
            whole = [tensors[i].reshape(-1).double() for i in bucket]  # a rank with one block may have less
            columns = [self._padded(t, self._lengths[i] * self._world.size) for t, i in zip(whole, bucket, strict=True)]
            sent = torch.cat([c.view(self._world.size, -1) for c in columns], dim=1)
            got = sent.new_empty(sent.shape[1])
            _collective("reduce_scatter")(got, sent.view(-1))
            pieces += torch.split(got, [self._lengths[i] for i in bucket])
        return [piece[: self._own(i)] for i, piece in enumerate(pieces)]

    def whole(self, pieces: Sequence[Tensor]) -> Tensors:
        """The inverse: full tensors on every rank, of the pieces of all."""
        if self._world.size == 1:
            return list(pieces)
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(piece.dtype for piece in pieces):  # a set's order may differ between processes
            for bucket in self._buckets([i for i, piece in enumerate(pieces) if piece.dtype == dtype]):
                sent = torch.cat([self._padded(pieces[i].reshape(-1), self._lengths[i]) for i in bucket])
                got = sent.new_empty(self._world.size * len(sent))
                _collective("all_gather")(got, sent)
                columns = torch.split(got.view(self._world.size, -1), [self._lengths[i] for i in bucket], dim=1)
                for i, column in zip(bucket, columns, strict=True):
                    found[i] = column.reshape(-1)[: self._params[i].numel()].view(self._params[i].shape)
        return [found[i] for i in range(len(pieces))]

    def placed(self, pieces: Sequence[Tensor]) -> Tensors:
        """The pieces as tensors that lie as the parameters do: shards stay where they are, others go to all ranks."""
        shared = [i for i, p in enumerate(self._params) if not is_sharded(p)]
        others = Pieces([self._params[i] for i in shared], self._world).whole([pieces[i] for i in shared])
        found = dict(zip(shared, others, strict=True))
        return [found[i] if i in found else _as_shard(piece, self._params[i]) for i, piece in enumerate(pieces)]

    def _own(self, i: int) -> int:
        """How many numbers of parameter i are this rank's: the last pieces may be short or empty."""
        left = self._params[i].numel() - self._world.rank * self._lengths[i]
        return max(0, min(self._lengths[i], left))

    def _padded(self, flat: Tensor, length: int) -> Tensor:
        return flat if len(flat) == length else nn.functional.pad(flat, (0, length - len(flat)))

    def _buckets(self, indices: Sequence[int]) -> Iterator[list[int]]:
        bucket: list[int] = []
        filled = 0
        for i in indices:
            size = self._lengths[i] * self._world.size
            if bucket and filled + size > _BUCKET:
                yield bucket
                bucket, filled = [], 0
            bucket.append(i)
            filled += size
        if bucket:
            yield bucket


def _collective(name: str) -> Callable[[Tensor, Tensor], Any]:
    """Of one tensor per rank; torch 2.13 renamed these."""
    older = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}[name]
    found: Callable[[Tensor, Tensor], Any] = getattr(dist, f"{name}_single", None) or getattr(dist, older)
    return found


def _check_layout(p: Any, world: World) -> None:
    mesh, placements = p.device_mesh, p.placements
    by_rank = mesh.ndim == 1 and mesh.size() == world.size and mesh.get_local_rank() == world.rank
    if not (by_rank and len(placements) == 1 and placements[0].is_shard(0)):
        raise ConfigError(
            f"Expected parameters sharded on dimension 0 over all {world.size} ranks, not {placements} on {mesh}. "
            "Use fully_shard(module) without a mesh of its own."
        )


def replicated(model: nn.Module) -> Tensors:
    """What every rank has in full of the model's parameters and buffers."""
    return [t for t in (*model.parameters(), *model.buffers()) if not is_sharded(t)]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, whose reducer has no part in private training."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    if type(model).__name__ == "FullyShardedDataParallel":
        raise ConfigError("FullyShardedDataParallel flattens parameters. Use torch.distributed.fsdp.fully_shard.")
    return model


def reshard(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded the model; if so, put away the whole parameters that a forward pass may have left."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    units = [m for m in model.modules() if fsdp is not None and isinstance(m, fsdp.FSDPModule)]
    for unit in units:
        unit.reshard()
    return bool(units)


def whole_model(model: nn.Module) -> nn.Module:
    """The model with all its parameters in full, at their values of this moment, on every rank.

    The model itself, unless FSDP2 has sharded it: then a plain copy, without FSDP's hooks, in which no pass sends
    anything. The copy is kept with the model and filled again at each call; it costs each rank one full set of
    parameters.
    """
    if not reshard(model):
        if any(map(is_sharded, model.parameters())):
            raise ConfigError("Expected sharded parameters to be those of fully_shard, not of another scheme.")
        return model
    if model not in _COPIES:
        _COPIES[model] = _plain_copy(model)
    _fill(_COPIES[model], model)
    return _COPIES[model]


@torch.no_grad()
def _fill(plain: nn.Module, model: nn.Module) -> None:
    for copied, module in zip(plain.modules(), model.modules(), strict=True):
        copied.training = module.training
    params = list(model.parameters())
    sharded = [i for i, p in enumerate(params) if is_sharded(p)]
    own = [params[i] for i in sharded]
    world = World.current(params[0].device)
    gathered = dict(zip(sharded, Pieces(own, world).whole([local(p) for p in own]), strict=True))
    for i, (there, p) in enumerate(zip(plain.parameters(), params, strict=True)):
        there.copy_(gathered.get(i, p))
        there.requires_grad_(p.requires_grad)


def _plain_copy(model: nn.Module) -> nn.Module:
    """A deep copy with parameters of full shape and the same buffers, as if `fully_shard` had not been called."""
    memo: dict[int, Any] = {id(b): b for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=p.device), requires_grad=p.requires_grad)
    modules = list(model.modules())
    for m in modules:
        memo[id(m)] = object.__new__(_plain_class(m))
    for m in modules:
        memo[id(m)].__dict__.update(copy.deepcopy(_plain_state(m), memo))
    found: nn.Module = memo[id(model)]
    return found


def _plain_class(m: nn.Module) -> type:
    """`fully_shard` puts a class of its own and `FSDPModule` in front of the module's."""
    fsdp = sys.modules["torch.distributed.fsdp"]
    return type(m).__mro__[2] if isinstance(m, fsdp.FSDPModule) else type(m)


def _plain_state(m: nn.Module) -> dict[str, Any]:
    kept = {k: v for k, v in vars(m).items() if not k.startswith(("__composable_api", "_fsdp", "_is_fsdp"))}
    return {k: _without_fsdp(v) if k.endswith("_hooks") else v for k, v in kept.items()}


def _without_fsdp(hooks: Any) -> Any:
    kept = {k: h for k, h in hooks.items() if not str(getattr(h, "__module__", "")).startswith("torch.distributed")}
    return type(hooks)(kept)
