"""The bugs: each is a function that returns changes of the real code, with a state of its own for one run."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn

from benchmarks.robustness.mutants.change import Change
from halfsilver._core.model_state import ModelState
from halfsilver._core.tensors import Tensors, batch_rows, trainable
from halfsilver.auditing import bank
from halfsilver.auditing.bank import Banked
from halfsilver.mirror import PublicLoss
from halfsilver.privacy import batches, gradients, mechanism, noise, releases
from halfsilver.privacy.batches import PrivateBatches
from halfsilver.privacy.entropy import Entropy, UnsafeSeed
from halfsilver.privacy.gradients import base
from halfsilver.privacy.gradients.base import ClippedSum
from halfsilver.privacy.gradients.book import outer
from halfsilver.privacy.gradients.book.example_gradients import SquaredNorms
from halfsilver.privacy.gradients.hooks import OpacusHooks
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.noise_chain import NoiseChain
from halfsilver.privacy.passes import PrivatePasses
from halfsilver.privacy.releases import Releases
from halfsilver.privacy.strategies import Correlated
from halfsilver.privacy.users import engine

Bug = Callable[[], list[Change]]


# ---- noise


def weaker_noise(factor: float) -> Bug:
    def scale(real: Any, *args: Any) -> float:
        return factor * float(real(*args))

    return lambda: [Change(noise, "noise_scale", scale)]


def _noise_from(choose: Callable[[Entropy], Entropy]) -> list[Change]:
    def noisy_mean(real: Any, total: ClippedSum, multiplier: float, entropy: Entropy, **options: Any) -> Any:
        return real(total, multiplier, choose(entropy), **options)

    return [Change(releases, "noisy_mean", noisy_mean)]


def same_in_every_step() -> list[Change]:
    seed = secrets.randbits(62)
    return _noise_from(lambda _: UnsafeSeed(seed))


def same_on_every_rank() -> list[Change]:
    """The seeds are drawn before the ranks are forked, and each rank takes them in the same order."""
    seeds = itertools.count(secrets.randbits(61))
    return _noise_from(lambda _: UnsafeSeed(next(seeds)))


@final
class _Rewound:
    """The same words again at every call."""

    is_private = False

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def words(self, n: int) -> Tensor:
        return UnsafeSeed(self._seed).words(n)


def same_on_every_tensor() -> list[Change]:
    return _noise_from(lambda entropy: _Rewound(int(entropy.words(1)) & (2**62 - 1)))


def added_on_every_rank() -> list[Change]:
    """Each rank adds all of the noise to its own sum, and none is added to the sum of these."""

    def clipped_sum(real: Any, self: Any) -> ClippedSum:
        share = real(self)
        return ClippedSum(noise.add_noise(share, self.plan.noise_multiplier, self._entropy), share.sensitivity)

    def noisy_mean(real: Any, total: ClippedSum, multiplier: float, entropy: Entropy, **options: Any) -> Any:
        return real(total, 0.0, entropy, **options)

    return [Change(PrivateGradient, "_clipped_sum", clipped_sum), Change(releases, "noisy_mean", noisy_mean)]


# ---- clipping


def longer_clip(factor: float, *modules: ModuleType) -> Bug:
    """Gradients of up to `factor` clip norms, in all modules that clip for a backend (its oracle is one of them)."""

    def factors(real: Any, norms: Tensor, max_grad_norm: float, *args: Any) -> Tensor:
        found: Tensor = real(norms, factor * max_grad_norm, *args)
        return found

    return lambda: [Change(module, "clip_factors", factors) for module in modules]


def nan_passes() -> list[Change]:
    """All four places where a value that is not finite would be stopped."""

    def factors(real: Any, norms: Tensor, max_grad_norm: float, tau: float, counted: Tensor | None = None) -> Tensor:
        found = (max_grad_norm / (1 + tau) / norms.double()).clamp_(max=1.0)
        return found if counted is None else found.where(counted, 0.0)

    def attempt(real: Any, self: Any, batch: Any, rows: Any) -> ClippedSum:
        counted = torch.isin(torch.arange(batch_rows(self._batches.padding)), torch.tensor(rows))
        found: ClippedSum = self._backend.clipped_sum(self._batches.piece(batch, rows), self._clip, counted)
        return found

    return [
        Change(base, "measurable", lambda real, norms: norms),
        Change(base, "clip_factors", factors),
        Change(PrivatePasses, "_attempt", attempt),
        Change(noise, "on_grid", lambda real, values, g, tame=False: values.double().div(g).round_()),
    ]


def gram_norm_cancels() -> list[Change]:
    """The norm from inner products in float32, without a bound on their rounding."""

    def rounded(real: Any, a: Tensor, b: Tensor) -> Tensor:
        return (a.float() @ b.float().mT).double()

    def unbounded(real: Any, squared: Tensor, left: Tensor, *args: Any) -> SquaredNorms:
        return SquaredNorms(squared.clamp(min=0.0), torch.zeros_like(squared))

    return [Change(outer, "_inner_products", rounded), Change(outer, "gram_norms", unbounded)]


def norm_misses_a_use() -> list[Change]:
    """Norms from what the layers saw, the sum from autograd over all uses of a weight, one of them past its layer.

    This is how ghost clipping works. The check on made-up rows is taken out, since a gate can hide that use from it.
    """

    def look_up(real: Any, layer: Any, place: Tensor) -> Tensor:
        past, through = bank.weight(layer).flatten()[place], real(layer, place)[:, 1]
        return torch.stack([past, through], dim=1)

    def clipped_sum(
        real: Any, self: Any, batch: Any, max_grad_norm: float, counted: Tensor | None = None, adding: Any = None
    ) -> ClippedSum:
        factors = base.clip_factors(base.row_norms(self.per_example(batch)), max_grad_norm, 1e-3, counted)
        with torch.enable_grad():
            losses = torch.where(factors > 0, self._loss_fn(self._model, batch), 0.0) * factors
            return ClippedSum(list(torch.autograd.grad(losses.sum(), trainable(self._model))), max_grad_norm)

    return [
        Change(bank, "_look_up", look_up),
        Change(OpacusHooks, "clipped_sum", clipped_sum),
        Change(gradients, "_require_close", lambda real, *args: None),
    ]


# ---- what a pass leaves behind


def _writing(write: Callable[[Any, Tensor], object]) -> list[Change]:
    """A model that has a buffer and a frozen weight to spare, and writes at each private pass what it read."""

    def made(real: Any, self: Banked, *args: Any) -> None:
        real(self, *args)
        self.register_buffer("seen", torch.zeros(()))
        self.register_parameter("frozen", nn.Parameter(torch.zeros(()), requires_grad=False))

    def forward(real: Any, self: Banked, record: Any, public: bool = False) -> Any:
        if not public:
            write(self, record[2].sum())
        return real(self, record, public)

    return [Change(Banked, "__init__", made), Change(Banked, "forward", forward)]


def _unguarded() -> list[Change]:
    """No layer is refused, no pass is tried on made-up rows, and nothing that a pass writes is put back."""
    return [
        Change(mechanism, "probe", lambda real, *args: None),
        Change(ModelState, "put_back", lambda real, self, values: []),
    ]


def buffer_written() -> list[Change]:
    return [*_unguarded(), *_writing(lambda model, read: model.seen.add_(read))]


def mode_flipped() -> list[Change]:
    return [*_unguarded(), *_writing(lambda model, read: model.inner.train(bool(read % 4 == 0)))]


def embedding_renormalised() -> list[Change]:
    def layer(real: Any, *args: Any) -> Any:
        made = real(*args)
        made.max_norm = 1e-6
        return made

    return [*_unguarded(), Change(bank, "_layer", layer)]


def frozen_weight_written_by_a_user() -> list[Change]:
    """Only trained weights and buffers are put back after a user's training."""

    @contextmanager
    def kept(real: Any, model: nn.Module) -> Iterator[None]:
        held = [(t, t.detach().clone()) for t in (*trainable(model), *model.buffers())]
        yield
        with torch.no_grad():
            for t, value in held:
                t.copy_(value)

    return [Change(engine, "untouched", kept), *_writing(lambda model, read: model.frozen.add_(read))]


# ---- sampling


def higher_rate(factor: float, module: ModuleType) -> Bug:
    def chunks(real: Any, population: int, rate: float, *args: Any) -> Any:
        return real(population, min(1.0, factor * rate), *args)

    return lambda: [Change(module, "poisson_chunks", chunks)]


def cyclic_batches() -> list[Change]:
    turns = itertools.count()

    def chunks(real: Any, population: int, rate: float, chunk: int, entropy: Entropy) -> Iterator[Tensor]:
        size = round(rate * population)
        members = (next(turns) * size + torch.arange(size)) % population
        yield from torch.split(members.sort().values, chunk)

    return [Change(batches, "poisson_chunks", chunks)]


def same_sample_on_every_rank() -> list[Change]:
    seeds = itertools.count(secrets.randbits(61))

    def chunks(real: Any, population: int, rate: float, chunk: int, entropy: Entropy) -> Any:
        return real(population, rate, chunk, UnsafeSeed(next(seeds)))

    return [Change(batches, "poisson_chunks", chunks)]


def padded_shard() -> list[Change]:
    """All ranks own equally many records, as torch's DistributedSampler has it: the first ones have two owners."""

    def opened(real: Any, self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self.population = math.ceil(self.population / self._world.size) * self._world.size

    def in_data(real: Any, self: Any, chosen: Any) -> Any:
        return (real(self, chosen) % self._records.size()).sort().values

    return [Change(PrivateBatches, "__init__", opened), Change(PrivateBatches, "_in_data", in_data)]


# ---- correlated noise


def coefficient_off_by_one() -> list[Change]:
    """What is carried over is that of one step later."""

    def carried(real: Any, self: NoiseChain, place: slice) -> Tensor:
        assert self._decays is not None
        return (self._factors * self._decays[:, 0]) @ self._held[:, place]

    return [Change(NoiseChain, "_carried", carried)]


def state_used_twice() -> list[Change]:
    """Every other step puts back what the chain remembered before the step before it, as an old checkpoint would."""
    held: dict[tuple[int, int], Tensor] = {}

    def follow(real: Any, self: NoiseChain, fresh: Tensor, start: int) -> Tensor:
        place = self._held[:, start : start + len(fresh)]
        key = id(self), start
        if self._step % 2 and key in held:
            place.copy_(held[key])
        held[key] = place.clone()
        found: Tensor = real(self, fresh, start)
        return found

    return [Change(NoiseChain, "follow", follow)]


def chain_begun_in_every_step() -> list[Change]:
    def noisy(real: Any, self: Releases, total: ClippedSum) -> Any:
        self._chain = None
        return real(self, total)

    return [Change(Releases, "noisy", noisy)]


def half_the_turns() -> list[Change]:
    """Records come back after half the separation."""

    def chunks(real: Any, population: int, turns: int, *args: Any) -> Any:
        return real(population, turns // 2, *args)

    return [Change(batches, "turn_chunks", chunks)]


def one_participation_counted() -> list[Change]:
    """The noise hides one step of a record, and not all of them together."""

    def sensitivity(real: Any, self: Correlated, rounds: int) -> float:
        return float(torch.linalg.vector_norm(self.coefficients.column(rounds)))

    return [Change(Correlated, "sensitivity", sensitivity)]


# ---- the rest of a step


def public_leak(share: float) -> Bug:
    """The public gradient has `share` of the private one in it, clipped but without noise."""

    def made() -> list[Change]:
        latest: Tensors = []

        def clipped_sum(real: Any, self: Any) -> ClippedSum:
            found: ClippedSum = real(self)
            latest[:] = [share / self.plan.expected_batch_size * t.double() for t in found.tensors]
            return found

        def gradient(real: Any, self: Any, *args: Any, **kwargs: Any) -> Tensors:
            return [g + private.to(g) for g, private in zip(real(self, *args, **kwargs), latest, strict=True)]

        return [Change(PrivateGradient, "_clipped_sum", clipped_sum), Change(PublicLoss, "gradient", gradient)]

    return made


def realised_batch() -> list[Change]:
    size = [0]

    def chunks(real: Any, *args: Any) -> Iterator[Any]:
        size[0] = 0
        for chosen in real(*args):
            size[0] += len(chosen)
            yield chosen

    def noisy_mean(real: Any, *args: Any, expected: float, **options: Any) -> Any:
        return real(*args, expected=float(max(1, size[0])), **options)

    return [Change(batches, "poisson_chunks", chunks), Change(releases, "noisy_mean", noisy_mean)]


def ledger_off_by_one() -> list[Change]:
    """The first step of a run is not written down, and the ledger does not count again when the run ends."""
    begun: WeakSet[Releases] = WeakSet()

    def intend(real: Any, self: Releases) -> Any:
        if self in begun:
            return real(self)
        begun.add(self)
        return 1, 1

    def finish(real: Any, self: Ledger, run_id: str, updates: int, files: Any = None) -> Any:
        return real(self, run_id, min(updates, self.runs[run_id].spent), files)

    return [Change(Releases, "_intend", intend), Change(Ledger, "finish", finish)]
