"""What still helps after training: choices on public rows that training has not seen, which cost no privacy."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfsilver._core.tensors import Batch, LossFn, eval_mode, lerp
from halfsilver.errors import ConfigError, require
from halfsilver.mirror.rows import PublicRows

_ROWS_AT_ONCE = 500
FEWEST_ROWS = 20
# Standard deviations of the Gaussian priors on log(temperature) and on the bias of each class.
_LOG_TEMPERATURE, _BIAS = 1.0, 0.5


class Calibrated(nn.Module):
    """Models whose logits are averaged, multiplied by a number, and shifted by one number per class.

    Args:
        models: One or more models that return logits of the same shape, classes along the last axis.
        temperature: Divides the logits, above 0.
        bias: Added to the logits afterwards, one number per class (default: none).
    """

    temperature: Tensor
    bias: Tensor | None

    def __init__(self, models: Sequence[nn.Module], temperature: float = 1.0, bias: Tensor | None = None) -> None:
        super().__init__()
        require(len(models) > 0, "number of models", len(models), "at least 1")
        require(temperature > 0, "temperature", temperature, "above 0")
        self.models = nn.ModuleList(models)
        self.register_buffer("temperature", torch.tensor(temperature))
        self.register_buffer("bias", bias)

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """The calibrated logits.

        Args:
            args: As the models take them.
            named: As the models take them.
        """
        logits = _mean([model(*args, **named) for model in self.models]) / self.temperature
        return logits if self.bias is None else logits + self.bias


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The outcome of `Finish.fit`. Printed, it says what was done and what it brought.

    Args:
        model: The model to use from now on.
        share: Share of the way from the start to the trained weights. 1 keeps the trained weights.
        joined: Number of models whose logits are averaged.
        temperature: Divides the logits. Above 1 where the model was too confident.
        bias: Added to the logits, one number per class, or None.
        loss_before: Held-out loss of the trained model.
        loss_after: Held-out loss of `model`. The rows have chosen it, so it is a little too low.
        rows: Number of held-out rows.
    """

    model: nn.Module
    share: float
    joined: int
    temperature: float
    bias: Tensor | None
    loss_before: float
    loss_after: float
    rows: int

    def __str__(self) -> str:
        parts = [f"temperature {self.temperature:.3g}"]
        parts += [] if self.bias is None else [f"biases of up to {float(self.bias.abs().max()):.2g}"]
        parts += [] if self.share == 1 else [f"{self.share:.0%} of the way from the start"]
        parts += [] if self.joined == 1 else [f"the mean logits of {self.joined} models"]
        return (
            f"Finished with {', '.join(parts)}: held-out public loss {self.loss_before:.4f} before, "
            f"{self.loss_after:.4f} after ({self.rows} rows)."
        )


@dataclass(frozen=True, kw_only=True)
class Finish:
    """A last step after private training, chosen on held-out public rows.

    Private training with a small clip norm makes a classifier too confident. `fit` corrects that with a temperature,
    which leaves the accuracy as it is. If asked, it also fits a bias per class, goes only a part of the way from the
    public start to the trained weights, or averages the logits of several released models. The trained weights are left
    only if the held-out loss falls by more than one standard error. All of it lowers the loss; biases and a part of the
    way may cost accuracy.

    Guarantee: it reads released models and public rows only, so it costs no privacy.

    Args:
        bias: Whether to fit a bias per class (default: no). It needs some dozens of held-out rows per class, with the
            class frequencies of the private rows.
        shares: Shares of the way from the start that are tried, each in [0, 1], where `fit` is given a start (default:
            none).

    Raises:
        ConfigError: A share is out of its range.

    References:
        Guo et al. (2017), On Calibration of Modern Neural Networks, arXiv:1706.04599: temperature scaling.
        Wortsman et al. (2022), Robust fine-tuning of zero-shot models, arXiv:2109.01903: the way from the start.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(400, 3)
    >>> rows = (x, (x[:, 0] + torch.randn(400) > 0).long())
    >>> sure = torch.nn.Linear(3, 2)
    >>> _ = sure.weight.data.copy_(torch.tensor([[-9.0, 0, 0], [9, 0, 0]]))
    >>> loss_fn = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    >>> finished = Finish().fit(sure, loss_fn, rows)
    >>> finished.temperature > 5, finished.loss_after < finished.loss_before / 2
    (True, True)
    """

    bias: bool = False
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(all(0 <= share <= 1 for share in self.shares), "shares", self.shares, "each in [0, 1]")

    def fit(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        held_out: Any,
        *,
        start: nn.Module | None = None,
        others: Sequence[nn.Module] = (),
    ) -> Finished:
        """Choose and fit the last step. The given models are not changed.

        Args:
            model: The trained model, which returns logits as one tensor, classes along the last axis.
            loss_fn: The loss of training. It may use the model only by calling it.
            held_out: Public rows of the kind of the private ones, at least 20, that neither the start nor a mirror nor
                a geometry has seen. On other rows a model looks better calibrated than it is.
            start: The model before the private steps, to try parts of the way from there.
            others: Further released models, such as earlier ones or other averages. The mean of all logits is tried.

        Returns:
            The finished model, and what was done.

        Raises:
            ConfigError: Too few rows, or a model or a loss that does not fit.
        """
        rows, count = PublicRows(held_out), len(PublicRows(held_out))
        require(count >= FEWEST_ROWS, "number of held-out rows", count, f"at least {FEWEST_ROWS}")
        batches = [rows.batch(slice(i, i + _ROWS_AT_ONCE), _device(model)) for i in range(0, count, _ROWS_AT_ONCE)]
        candidates: list[tuple[float, list[nn.Module]]] = [(1.0, [model])]
        if start is not None:
            candidates += [(share, [_between(start, model, share)]) for share in self.shares]
        if others:
            candidates += [(1.0, [model, *others])]
        fits = [_Fit.of(models, loss_fn, batches, self.bias) for _, models in candidates]
        plain = best = fits[0]
        for fit in fits[1:]:
            ahead = plain.after - fit.after
            sure = float(ahead.mean()) > float(ahead.std()) / math.sqrt(count)
            best = fit if sure and fit.after.mean() < best.after.mean() else best
        share, models = candidates[fits.index(best)]
        return Finished(
            model=Calibrated([copy.deepcopy(one) for one in models], best.temperature, best.bias),
            share=share,
            joined=len(models),
            temperature=best.temperature,
            bias=best.bias,
            loss_before=float(plain.before.mean()),
            loss_after=float(best.after.mean()),
            rows=count,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fit:
    """Temperature and bias of some models, and the losses of all rows before and after."""

    temperature: float
    bias: Tensor | None
    before: Tensor
    after: Tensor

    @classmethod
    def of(cls, models: Sequence[nn.Module], loss_fn: LossFn, batches: Sequence[Batch], bias: bool) -> _Fit:
        recorded = [_recorded(models, loss_fn, batch) for batch in batches]
        logits = [outputs for outputs, _ in recorded]
        before = torch.cat([losses for _, losses in recorded])
        sample = logits[0][0]
        log_temperature = torch.zeros((), dtype=sample.dtype, device=sample.device, requires_grad=True)
        shift = torch.zeros(sample.shape[-1], dtype=sample.dtype, device=sample.device, requires_grad=bias)

        def losses() -> Tensor:
            factor = torch.exp(-log_temperature)
            replays = [_Replay([factor * one + shift for one in outputs]) for outputs in logits]
            return torch.cat([loss_fn(replay, batch) for replay, batch in zip(replays, batches, strict=True)])

        fitted = [log_temperature, shift] if bias else [log_temperature]
        solver = torch.optim.LBFGS(fitted, max_iter=60, line_search_fn="strong_wolfe")

        def objective() -> float:
            solver.zero_grad()
            priors = (log_temperature / _LOG_TEMPERATURE) ** 2 / 2 + ((shift / _BIAS) ** 2).sum() / 2
            value = losses().mean() + priors / len(before)
            torch.autograd.backward([value])
            return float(value.detach())

        with torch.enable_grad():
            solver.step(objective)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            after = losses()
        return cls(
            temperature=math.exp(float(log_temperature.detach())),
            bias=shift.detach() if bias else None,
            before=before,
            after=after,
        )


class _Replay(nn.Module):
    """Stands for a model in a loss, and returns stored logits in the order of its calls."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = iter(outputs)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return next(self._outputs)


class _Recorder(nn.Module):
    """Stands for models in a loss, and keeps the mean of their logits at each call."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self._models, self.outputs = models, list[Tensor]()

    def forward(self, *args: Any, **named: Any) -> Tensor:
        self.outputs.append(_mean([model(*args, **named) for model in self._models]))
        return self.outputs[-1]


@torch.no_grad()
def _recorded(models: Sequence[nn.Module], loss_fn: LossFn, batch: Batch) -> tuple[list[Tensor], Tensor]:
    recorder = _Recorder(models)
    with _all_in_eval_mode(models):
        try:
            losses = loss_fn(recorder, batch)
        except AttributeError as error:
            raise ConfigError(f"Finish needs a loss that uses the model only by calling it ({error}).") from error
    if not recorder.outputs:
        raise ConfigError("Finish needs a loss that calls the model it is given. This one did not.")
    return recorder.outputs, losses


@contextmanager
def _all_in_eval_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    if not models:
        yield
        return
    with eval_mode(models[0]), _all_in_eval_mode(models[1:]):
        yield


def _mean(outputs: Sequence[Any]) -> Tensor:
    for output in outputs:
        kind = type(output).__name__
        if not isinstance(output, Tensor):
            raise ConfigError(f"Finish needs models that return logits as a tensor, got {kind}. Wrap the model.")
    return outputs[0] if len(outputs) == 1 else torch.stack(list(outputs)).mean(0)


@torch.no_grad()
def _between(start: nn.Module, end: nn.Module, share: float) -> nn.Module:
    """start + share (end - start), for the trainable parameters of `end`."""
    model = copy.deepcopy(end)
    first = dict(start.named_parameters())
    params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name, p in params if name not in first or first[name].shape != p.shape]
    if missing:
        raise ConfigError(f"Expected the start to have the parameters of the model, {missing[0]!r} does not fit.")
    values = lerp(share, [p for _, p in params], [first[name] for name, _ in params])
    for (_, p), value in zip(params, values, strict=True):
        p.copy_(value)
    return model


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
