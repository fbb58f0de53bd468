"""Which whole numbers a private record may hold: a label or a token that the model has no place for is out of range.

On a GPU such a number ends the process, and each one that resumes the run. So it is looked for in the rows as they are
read, before they are copied to the device. A row that has one contributes nothing, like any that cannot be used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfsilver._core.model_state import untouched
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, LossFn, batch_leaves, take_rows, trainable
from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.silence import silent

_FIRST, _APART = 2**40, 2**20  # of numbers for which no table has a place, and which show what was added to them
_LEAST, _MOST = -(2**63), 2**63 - 1
_LEFT_OUT = (0, -1, -100, 255)  # numbers that a pass may leave out by itself, with what comes after the last one
_MOST_TRIED = 16  # further ones of a column, which public rows have
_log = logging.getLogger("halfsilver")


class Range(NamedTuple):
    """For each number of a column's records its least and highest value, and where others are allowed as well."""

    low: Tensor
    high: Tensor
    others: Mapping[int, Tensor]

    def holds(self, column: Tensor) -> Tensor:
        """Which rows of a column have nothing else."""
        rows = column[:, None].flatten(1).to(torch.int64)
        inside = (rows >= self.low.to(rows.device)) & (rows <= self.high.to(rows.device))
        for value, allowed in self.others.items():
            inside |= (rows == value) & allowed.to(rows.device)
        return inside.all(1)


@final
class Ranges:
    """Ranges of the columns of whole numbers, from public knowledge alone; without arguments, none.

    `run` is a pass over a batch, and `made_up` are rows for it, on the device. In these rows, each whole number is one
    that no table has a place for. So each look-up, in an embedding or among the classes of a loss, shows which of them
    it gets, and it is given zeros instead: such a pass cannot end the process. The size of the table is their range.
    What a pass clamps or masks first has none, and neither has what it does not look up. `known` is false where one
    looks up something else than a number of a record and a constant, such as a sum of several.

    Where the pass fails on such numbers, the range of a column is what was `declared` under its name. The labels of
    public rows are no bound, because private rows may be of further classes. But what is out of range in `shown`, some
    public rows, is tried: a pass may know such a number, as it knows the label -100.
    """

    def __init__(
        self,
        run: Callable[[Batch], Any] | None = None,
        made_up: Batch = (),
        declared: Mapping[str, int] | None = None,
        shown: Batch | None = None,
    ) -> None:
        paths, structure = pytree.tree_flatten_with_path(made_up)
        names: dict[int, Any] = {
            i: getattr(path[0], "key", i) if path else i for i, (path, t) in enumerate(paths) if _is_whole(t)
        }
        found = {i: (declared or {}).get(name, 0) for i, name in names.items()}
        least, usual = torch.tensor(0), {-100: torch.tensor(True)}
        self._columns = {i: Range(least, torch.tensor(count - 1), usual) for i, count in found.items() if count}
        self.known = all(found.values())
        if run and (names or any(t.is_cuda for _, t in paths)):
            with silent((UnsupportedLayer,)):  # some passes look at the values themselves, and fail
                known = [t.cpu() for t in batch_leaves(made_up if shown is None else shown)]
                self._columns, self.known = _measured(run, [t for _, t in paths], structure, list(names), known)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss_fn: LossFn,
        made_up: Batch,
        declared: Mapping[str, int] | None = None,
        shown: Batch | None = None,
    ) -> Ranges:
        """Those of a model and its loss. On a GPU, the log says where they could not be found."""
        device = trainable(model)[0].device
        with untouched(model), own_randomness(0, [device]):
            ranges = cls(
                lambda batch: loss_fn(model, batch), made_up, {**_configured(model), **(declared or {})}, shown
            )
        if device.type != "cpu" and not ranges.known:
            _log.warning(
                "The range of some whole numbers of a record is not known: the loss fails on made-up ones, or adds "
                "several up. On a GPU, one that is out of range ends the process. Look for such records beforehand."
            )
        return ranges

    def usable(self, batch: Batch) -> Tensor | None:
        """Which rows of a batch are in range; None where all are."""
        leaves = batch_leaves(batch)
        found = [kind.holds(leaves[i]) for i, kind in self._columns.items()]
        usable = torch.stack(found).all(0) if found else None
        return None if usable is None or bool(usable.all()) else usable

    def inside(self, batch: Batch) -> Batch:
        """The rows of a batch that are in range, in their order."""
        usable = self.usable(batch)
        return batch if usable is None else take_rows(batch, usable)


def _is_whole(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _configured(model: nn.Module) -> dict[str, int]:
    """What the configuration of a model of `transformers` says of its columns."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    labels = "num_labels" if "Classification" in type(base).__name__ else "vocab_size"
    named = {"input_ids": "vocab_size", "labels": labels}
    counts = {column: getattr(getattr(base, "config", None), name, None) for column, name in named.items()}
    return {column: count for column, count in counts.items() if isinstance(count, int) and count > 1}  # 1: no class


# ---- what a pass looks up


class _LookUp(NamedTuple):
    numbers: Tensor
    places: int
    left_out: int | None

    def fails(self) -> bool:
        return not bool(((self.numbers >= 0) & (self.numbers < self.places) | (self.numbers == self.left_out)).all())


# Of an operation: which argument is looked up, and in which dimension of the first. None: the second says so.
_TABLES: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), (1, 0)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), (1, 1)),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "index_select", "index_add", "index_copy"), (2, None)),
}


def _noted(found: list[_LookUp], func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation of torch, which is given zeros for what it looks up; that is noted."""
    name, given = func._schema.name.removeprefix("aten::").rstrip("_"), list(args)

    def zeros(index: Tensor, places: int, left_out: int | None = None) -> Tensor:
        found.append(_LookUp(index.flatten().cpu().long(), places, left_out))
        return torch.zeros_like(index)

    if name == "binary_cross_entropy" and args[0].is_cuda:
        raise UnsupportedLayer(
            "On a GPU, binary_cross_entropy ends the process where a prediction is NaN, which one record may cause. "
            "Use binary_cross_entropy_with_logits."
        )
    if name in ("index", "_unsafe_index") and all(t is None or _is_whole(t) for t in args[1]):
        given[1] = [t if t is None else zeros(t, size) for t, size in zip(args[1], args[0].shape, strict=False)]
    elif name in _TABLES:
        place, dim = _TABLES[name]
        size = args[0].shape[args[1] if dim is None else min(dim, args[0].dim() - 1)]
        given[place] = zeros(args[place], size, args[4] if name.startswith("nll_loss") else None)
    return func(*given, **kwargs)


def _measured(
    run: Callable[[Batch], Any], leaves: list[Tensor], structure: Any, places: list[int], shown: list[Tensor]
) -> tuple[dict[int, Range], bool]:
    """Ranges of the leaves at `places`, and whether all look-ups are understood."""
    sizes = [leaves[i][0].numel() for i in places]
    codes = _FIRST + _APART * torch.arange(sum(sizes))

    def look_ups(values: Tensor) -> list[_LookUp]:
        filled, noted = list(leaves), list[_LookUp]()
        for i, part in zip(places, torch.split_with_sizes(values, sizes), strict=True):
            filled[i] = part.view(leaves[i].shape[1:]).expand(leaves[i].shape).to(leaves[i].device, copy=True)

        def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return _noted(noted, func, args, kwargs or {})

        with torch.no_grad(), type("Watch", (TorchDispatchMode,), {"__torch_dispatch__": dispatch})():
            run(pytree.tree_unflatten(filled, structure))
        return noted

    found, at, reached, known = look_ups(codes), torch.arange(len(codes)), list[Tensor](), True
    left_out = {*_LEFT_OUT, *(each.left_out for each in found if each.left_out is not None)}
    low, high = torch.full_like(codes, _LEAST), torch.full_like(codes, _MOST)
    for each in found:
        place = (each.numbers - _FIRST + _APART // 2).div(_APART, rounding_mode="floor")
        added = each.numbers - _FIRST - _APART * place
        own = (place >= 0) & (place < len(codes))
        low.scatter_reduce_(0, place[own], -added[own], "amax")
        high.scatter_reduce_(0, place[own], each.places - 1 - added[own], "amin")
        reached.append(torch.isin(at, place[own]))
        known &= bool((own | (each.numbers.abs() < _FIRST // 2)).all())

    bounded = high < _MOST  # the others stay as they are: another mask may take another path

    def allowed(values: Tensor) -> Tensor:
        """Which numbers of a record may have these values: no look-up that they reach fails."""
        failed, fine = [each.fails() for each in look_ups(values.where(bounded, codes))], torch.ones_like(bounded)
        for number, of in enumerate(reached):
            fine &= ~of | (not (failed[number] if len(failed) == len(found) else any(failed)))
        return fine

    sure = allowed(low) & allowed(high)
    low, high = low.where(sure, _LEAST), high.where(sure, _MOST)
    high = high + (allowed(high + 1) & sure & bounded).long()  # one more may mean: no number
    for i, least, most in zip(places, *(torch.split_with_sizes(t, sizes) for t in (low, high)), strict=True):
        rows = shown[i][:, None].flatten(1).long()
        left_out |= set(rows[(rows < least) | (rows > most)].unique()[:_MOST_TRIED].tolist())
    others = {v: allowed(torch.full_like(codes, v)) & ((v < low) | (v > high)) for v in sorted(left_out)}
    ranges, parts = {}, [torch.split_with_sizes(t, sizes) for t in (low, high, *others.values())]
    for i, least, most, *rest in zip(places, *parts, strict=True):
        if (most < _MOST).any():
            ranges[i] = Range(least, most, {v: t for v, t in zip(others, rest, strict=True) if t.any()})
    return ranges, known and bool(sure.all())
