"""What a study learns (`Problem`) and how it is trained (`Recipe`), both as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from halfsilver._core.given import as_data
from halfsilver._core.local_training import LocalTraining
from halfsilver._core.tensors import Batch, LossFn
from halfsilver.errors import ConfigError, require
from halfsilver.privacy.recognise import shares_rows

Augment = Callable[[Batch], Batch]

_BETTER = {"accuracy": 1, "loss": -1, "error": -1, "perplexity": -1}  # by a part of the metric's name


def better(metric: str) -> int:
    """1 if more of it is better, -1 if less is, 0 if its name does not tell.

    >>> better("top-5 accuracy"), better("loss"), better("length")
    (1, -1, 0)
    """
    return next((sign for part, sign in _BETTER.items() if part in metric.lower()), 0)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Data, model and loss.

    `make_model` takes its random weights from torch's global generator, which the caller seeds. `population` is the
    declared number of private records: a public constant, never counted by the library. `validation` holds training
    records that are set aside for a search as papers do it; nothing else may touch them. `curve` are the test rows on
    which curves are drawn (all of them by default). `augment` changes a public batch at random, by torch's global
    generator. `confidence` is the largest probability of each row; with a metric "accuracy" the study then reports the
    calibration error. `about` says in JSON where the data come from and how they were split; its "stamps" are shown to
    readers.

    Where `private` is a `PrivateUsers` handle, users train themselves, the population is counted in users, and
    `public_users` are the public rows again, user by user.
    """

    make_model: Callable[[], nn.Module]
    loss_fn: LossFn
    private: Any
    public: Any
    test: Any
    population: int
    metrics: Mapping[str, LossFn] = field(default_factory=dict)
    validation: Any = None
    curve: Any = None
    augment: Augment | None = None
    confidence: LossFn | None = None
    public_users: Sequence[Batch] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.population >= 1, "population", self.population, "at least 1")
        for name in ("public", "test", "validation", "curve"):
            if getattr(self, name) is self.private or shares_rows(self.private, getattr(self, name)):
                raise ConfigError(f"The private data were given as {name} too, which is read without protection.")
            object.__setattr__(self, name, as_data(getattr(self, name)))  # afterwards, because a copy is not recognised


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """How a study pretrains on public data: Adam, with early stopping on held-out public rows.

    Args:
        epochs: The most epochs, at least 1.
        patience: Epochs without a better held-out loss after which training stops.
        batch_size: Public rows per step.
        lr: Learning rate of Adam at the start.
        lr_end: Share of `lr` that is left at the end of a cosine, in [0, 1]. 1 keeps it constant.
        weight_decay: Weight decay of AdamW. 0 is Adam.
        holdout: Share of public rows that early stopping looks at. 0 trains on all rows for all `epochs`.
        augment: Whether the problem's `augment` changes the batches.
        average: Decay of an exponential average of the weights, or None.
    """

    epochs: int = 60
    patience: int = 10
    batch_size: int = 64
    lr: float = 1e-3
    lr_end: float = 1.0
    weight_decay: float = 0.0
    holdout: float = 0.1
    augment: bool = False
    average: float | None = None


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What a study searches: learning rates per method, and the final alpha of the mirror.

    Args:
        cold: Learning rates from random weights, each above 0.
        warm: Learning rates from the public start.
        pda: Learning rates with the mirror.
        alpha_end: Values in [0, 1] at which alpha ends. Empty for the exact mirror step (a recipe with `damping`).
    """

    cold: tuple[float, ...]
    warm: tuple[float, ...]
    pda: tuple[float, ...]
    alpha_end: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("cold", "warm", "pda"):
            rates = getattr(self, name)
            require(len(rates) > 0 and min(rates) > 0, f"{name} learning rates", rates, "one or more above 0")
        ends = self.alpha_end
        require(all(0 <= end <= 1 for end in ends), "alpha_end", ends, "each in [0, 1]")

    @property
    def middle_end(self) -> float | None:
        """Where alpha ends if nothing is searched."""
        return self.alpha_end[len(self.alpha_end) // 2] if self.alpha_end else None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about training that is the same for all methods, and the grid of what is not.

    Args:
        name: Names the recipe in reports.
        batch_size: Expected private records (or users) per step.
        public_batch_size: Public rows per step of the mirror.
        grid: What is searched.
        epochs: Epochs over the population. Give this or `rounds`.
        rounds: Number of private steps. Give this or `epochs`.
        pretrain: How the public start is trained.
        max_grad_norm: Clip norm.
        cold_max_grad_norm: Clip norm from random weights, whose gradients are small (default: `max_grad_norm`).
        clip_released: Clip the released gradient once more, to the clip norm.
        public_max_norm: Clip norm of the public gradient in the mirror step, or None.
        augment_public: Whether the problem's `augment` changes public batches of the mirror.
        damping: Replaces the first-order mirror step by the exact one of a convex public loss, `Bregman(damping=...)`.
        average: Decay of an exponential average of the iterates, or None.
        lr_end: Share of the learning rate that is left at the end of a cosine, in [0, 1].
        optimizer: The class in torch.optim that takes the steps, such as "AdamW" (default: "SGD"). Whatever it does
            with released gradients costs no privacy.
        momentum: Its `momentum`, in [0, 1), for classes that have one (default: their own).
        search_share: Length of a search run as a share of a whole run, in (0, 1].
        score: The metric that chooses settings: "loss", or the name of one of the problem's metrics.
        spare: Share of steps kept in hand for those that a kill loses, in [0, 1]. They are paid for in noise.
        micro_batch_size: Rows in memory at once (default: the fastest, measured; set it on a busy machine).
        autocast: "bfloat16" runs private forward passes in that precision, where the machine has it.
        noise_multiplier: Fixes the noise, so that epsilon follows (default: the least noise for the study's epsilon).
        local: How users train locally. Batch sizes then count users.
        public_examples: The most rows on which a public user of a step trains.

    Raises:
        ConfigError: A value is out of its range.
    """

    name: str
    batch_size: int
    public_batch_size: int
    grid: Grid
    epochs: float | None = None
    rounds: int | None = None
    pretrain: Pretrain = field(default_factory=Pretrain)
    max_grad_norm: float = 1.0
    cold_max_grad_norm: float | None = None
    clip_released: bool = False
    public_max_norm: float | None = None
    augment_public: bool = False
    damping: float | None = None
    average: float | None = None
    lr_end: float = 1.0
    optimizer: str | None = None
    momentum: float | None = None
    search_share: float = 0.2
    score: str = "loss"
    spare: float = 0.02
    micro_batch_size: int | None = None
    autocast: str | None = None
    noise_multiplier: float | None = None
    local: LocalTraining | None = None
    public_examples: int | None = None

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        require(self.public_batch_size >= 1, "public_batch_size", self.public_batch_size, "at least 1")
        given = [value for value in (self.epochs, self.rounds) if value is not None]
        require(len(given) == 1, "number of epochs and rounds", given, "to be one of the two")
        require(given[0] > 0, "epochs or rounds", given[0], "above 0")
        require(0 < self.search_share <= 1, "search_share", self.search_share, "in (0, 1]")
        require(0 <= self.lr_end <= 1, "lr_end", self.lr_end, "in [0, 1]")
        require(0 <= self.spare <= 1, "spare", self.spare, "in [0, 1]")
        kind = getattr(torch.optim, self.optimizer or "SGD", None)
        known = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        require(known, "optimizer", self.optimizer, "the name of a class in torch.optim, such as 'SGD' or 'AdamW'")
        require(0 <= (self.momentum or 0.0) < 1, "momentum", self.momentum, "in [0, 1)")
        ends, wanted = self.grid.alpha_end, "one or more, or none with damping"
        require(bool(ends) == (self.damping is None), "alpha_end", ends, wanted)
        require(better(self.score) != 0, "score", self.score, "to be 'loss' or a metric such as 'accuracy'")
        require(self.local is None or self.autocast is None, "autocast", self.autocast, "to be left out with local")
        require(self.autocast in (None, "bfloat16"), "autocast", self.autocast, "to be 'bfloat16' or None")

    def steps(self, population: int, share: float = 1.0) -> int:
        """Number of private steps.

        Args:
            population: The declared number of private records.
            share: Share of a whole run, in (0, 1].
        """
        epoch = population / min(self.batch_size, population)
        return max(1, round(share * (self.rounds or (self.epochs or 0) * epoch)))


@dataclass(frozen=True)
class Setting:
    """One point of the grid: learning rate, final alpha of the mirror, damping of the geometry."""

    lr: float
    alpha_end: float | None = None
    damping: float | None = None

    @property
    def label(self) -> str:
        """A name for folders.

        >>> Setting(0.5, 0.9).label, Setting(0.5, damping=1.0).label
        ('lr=0.5,alpha=0.9', 'lr=0.5,damping=1')
        """
        parts = {"lr": self.lr, "alpha": self.alpha_end, "damping": self.damping}
        return ",".join(f"{name}={value:g}" for name, value in parts.items() if value is not None)

    def to_json(self) -> dict[str, float | None]:
        """As files hold it; without the damping where there is none, as before there was one."""
        given = {"lr": self.lr, "alpha_end": self.alpha_end, "damping": self.damping}
        return {name: value for name, value in given.items() if name != "damping" or value is not None}
