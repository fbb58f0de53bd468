"""Private passes over the model: clipped gradients of a sample are summed, and whatever a pass writes is undone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import final

import torch

from halfsilver._core.model_state import ModelState
from halfsilver._core.tensors import Batch, LossFn, batch_leaves, batch_rows, map_batch, trainable
from halfsilver.privacy.batches import Chunk, PrivateBatches
from halfsilver.privacy.gradients import ClippedSum, GradientBackend
from halfsilver.privacy.gradients.base import Adding, Tunable
from halfsilver.privacy.gradients.users import clipped_user_gradient
from halfsilver.privacy.pieces import in_parts
from halfsilver.privacy.silence import silent

_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)


@final
class PrivatePasses:
    """Sums the clipped gradients of the units in a sample.

    Guarantee: every pass runs on the model as it is when `clipped_sum` is called, and leaves it so. A write that a
    version counter shows is undone after the pass that made it. A write that no counter shows is found at the end; the
    same sample is then summed again, with a comparison of every value after each pass. A unit whose pass fails, is not
    finite, or writes into the model contributes zero, and no error, warning or log line tells of it.

    `ranks` is the number of processes that share a sample; `adding` bounds the rounding of the sum over all of them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        backend: GradientBackend,
        batches: PrivateBatches,
        max_grad_norm: float,
        adding: Adding,
        ranks: int,
    ) -> None:
        self._model, self._loss_fn, self._backend, self._batches = model, loss_fn, backend, batches
        self._clip, self._adding = max_grad_norm, adding
        self._fewest_exact = adding.rows // ranks
        self._any_shape = getattr(backend, "any_shape", False)
        self._state = ModelState(model)
        self._careful, self._added = False, 0

    def tune(self) -> None:
        """Let the backend measure its options on made-up rows."""
        if not self._batches.of_users and isinstance(self._backend, Tunable):
            self._backend.tune(self._batches.padding, self._adding)

    def rehearse(self) -> None:
        """One private pass, on made-up rows."""
        made_up = map_batch(torch.clone, self._batches.padding)
        if self._batches.of_users:
            clipped_user_gradient(self._model, self._loss_fn, [made_up], self._clip)
        else:
            everyone = torch.ones(batch_rows(made_up), dtype=torch.bool)  # a backend that takes none fails aloud here
            self._backend.clipped_sum(made_up, self._clip, everyone, self._adding)

    def clipped_sum(self, chunks: list[Chunk]) -> ClippedSum:
        """Of the sampled units. Nothing in it waits for another rank."""
        self._state.record()
        try:
            total = self._sum(chunks, careful=False)
            if self._state.put_back(values=True):
                total = self._sum(chunks, careful=True)
        except BaseException:
            self._state.put_back(values=True)
            raise
        return total

    def usable(self, chunks: list[Chunk]) -> int:
        """How many of the sampled units contribute."""
        self._careful, self._added = True, 0
        self._state.record()
        try:
            if not self._batches.of_users:
                return sum(map(self._usable_rows, map(self._batches.fetch, chunks)))
            sums = (part for user in self._batches.users(chunks) for part in self._of_user(user))
            return sum(any(bool(t.any()) for t in part.tensors) for part in sums)  # zero: no row, or none is finite
        finally:
            self._state.put_back(values=True)

    def _sum(self, chunks: Iterable[Chunk], *, careful: bool) -> ClippedSum:
        self._careful, self._added = careful, 0
        total: ClippedSum | None = None
        for part in self._parts(chunks):
            if total is None:
                total = part  # usually the only one for a large model, which then needs no second set of tensors
            else:
                total.add_(part)
        return total or ClippedSum.zeros(trainable(self._model), self._clip)

    def _parts(self, chunks: Iterable[Chunk]) -> Iterator[ClippedSum]:
        if self._batches.of_users:
            for user in self._batches.users(chunks):
                yield from self._of_user(user)
        else:
            for batch in self._batches.examples(chunks):
                yield from self._of_examples(batch)

    def _of_examples(self, batch: Batch) -> Iterator[ClippedSum]:
        """The clipped sum of a batch; where that fails, of the examples for which it does not.

        A label out of range, for example, raises inside the loss. The model itself has passed the probe, so the cause
        is a record. To find it, some examples are tried at a time, at their places in a batch of the full shape with
        made-up ones at all others. What counts is a last pass with all good ones in place, so a bad example moves no
        other one.
        """
        self._added += batch_rows(batch)
        for _, part in in_parts(partial(self._attempt, batch), range(batch_rows(batch))):
            yield part

    def _attempt(self, batch: Batch, rows: Sequence[int]) -> ClippedSum | None:
        """The clipped sum of these rows, if any; None if the pass failed, is not finite or wrote into the model.

        A write may have reached the other examples of the batch. By itself, the example that causes it is left out.
        """
        if not rows:
            return None
        part, short = None, False
        with silent():
            try:
                # The closed form of a linear model runs no code but its own, and needs neither padding nor a copy.
                piece = batch if self._any_shape else self._batches.piece(batch, rows)
                everyone, counted = len(rows) == batch_rows(piece), torch.zeros(batch_rows(piece), dtype=torch.bool)
                counted[torch.tensor(rows)] = True
                part = self._backend.clipped_sum(piece, self._clip, None if everyone else counted, self._how_to_add())
            except _NO_MEMORY:
                short = True
        if short:
            self._require_memory()
        written = self._state.put_back(values=self._careful)
        if part is None or written or not all(math.isfinite(t.sum()) for t in part.tensors):
            return None
        return part

    def _of_user(self, batches: Iterator[Batch]) -> Iterator[ClippedSum]:
        part, short = None, False
        with silent():
            try:
                part = clipped_user_gradient(self._model, self._loss_fn, batches, self._clip, self._adding)
            except _NO_MEMORY:
                short = True
        if short:
            self._require_memory()
        if not self._state.put_back(values=self._careful) and part is not None:
            yield part

    def _usable_rows(self, batch: Batch) -> int:
        parts = in_parts(partial(self._attempt, batch), range(batch_rows(batch)))
        good = [row for rows, _ in parts for row in rows]
        leaves = [t[good] for t in batch_leaves(batch) if t.layout == torch.strided] if good else []
        finite = [t.reshape(len(good), -1).isfinite().all(1) for t in leaves]
        return int(torch.stack(finite).all(0).sum()) if finite else len(good)

    def _how_to_add(self) -> Adding:
        """How to sum the next rows: in float64 throughout once there are more than the margin pays for."""
        return replace(self._adding, exact=self._added > self._fewest_exact)

    def _require_memory(self) -> None:
        """Raise if made-up rows lack memory as well. If they do not, what asked for so much was a record."""
        try:
            self.rehearse()
        except _NO_MEMORY:
            rows = batch_rows(self._batches.padding)
            raise MemoryError(
                f"There is not enough memory for a private pass over {rows} rows. Set a smaller micro_batch_size."
            ) from None
