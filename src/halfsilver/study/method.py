"""Methods: the arms of a study, each a value that says how public data are used. This file is their one registry."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from halfsilver.errors import ConfigError, require
from halfsilver.mirror import Bregman, Euclidean, FallBack, Finish, FirstOrder, Geometry, MirrorMap, Whitened, cosine
from halfsilver.mirror.base import described
from halfsilver.mirror.centre import Centre
from halfsilver.study.problem import Grid, Recipe, Setting

Start = Literal["public", "random"]
GridRow = Literal["cold", "warm", "pda"]

BEST_PRIVATE = "private"  # stands in a verdict for the best private method, so no method may have this name
_PLAIN = Euclidean()  # DP-SGD
_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What a reader of a study must know of a method; study.json records it for methods that users define.

    Args:
        name: Names the method in tables, figures and folders.
        start: The weights it starts from: "public" for those pretrained on public data, "random" for untrained ones.
        against: Name of the method that it is paired with in verdict and report. None leaves it unpaired.
        trains: Whether it takes private steps. A method that does not costs no epsilon and needs no search.
        description: A few words for the report.
        effect: Words for what the pair shows and for the baseline, as in ("the mirror", "a warm start without it").
            By default the sentences name both methods.
    """

    name: str
    start: Start = "public"
    against: str | None = None
    trains: bool = True
    description: str = ""
    effect: tuple[str, str] | None = None

    @property
    def pair(self) -> str:
        """The name of the paired difference, as in "pda - warm"."""
        return f"{self.name} - {self.against}"

    @property
    def subjects(self) -> tuple[str, str]:
        """Who changes a figure, and against what."""
        return self.effect or (f"the method {self.name}", f"the method {self.against}")

    @classmethod
    def from_json(cls, name: str, record: Mapping[str, Any]) -> Arm:
        effect = record.get("effect")
        return cls(
            name=name,
            start=record["start"],
            against=record["against"],
            trains=record["trains"],
            description=record["description"],
            effect=None if effect is None else (effect[0], effect[1]),
        )


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the mirror map of a run may depend on: the setting that the search tries, and the recipe."""

    setting: Setting
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class Method(Arm):
    """One arm of a study, and the whole of how it uses public data.

    Training starts from `start`, clips in the coordinates of `geometry`, passes every released gradient through
    `mirror`, and ends with `finish`. The last three see no private record, so methods with the same plan have the same
    (epsilon, delta).

    >>> guarded = Method(name="cautious", mirror=FirstOrder(0.9), against="warm")
    >>> [method.name for method in resolve(["warm", guarded])]
    ['warm', 'cautious']

    Args:
        name: Letters, digits, "-" and "_", at most 40 of them, because it names folders.
        start: The weights it starts from: "public" for those pretrained on public data, "random" for untrained ones.
        against: Name of the method that it is paired with in verdict and report. None leaves it unpaired.
        trains: Whether it takes private steps. A method that does not costs no epsilon and needs no search.
        description: A few words for the report.
        effect: Words for what the pair shows and for the baseline, as in ("the mirror", "a warm start without it").
        geometry: Coordinates for the clip and the noise, made from public rows (default: those of the weights). A
            function of `Conditions` makes them depend on what the search tries, such as ``at.setting.damping``.
        centre: Clip users' updates around that of public users (default: around zero). Only for tasks whose records are
            users.
        mirror: The map that turns a released gradient into the optimizer's direction, after the noise. A function of
            `Conditions` makes the map depend on what the search tries, such as ``at.setting.alpha_end``.
        finish: A last step on public rows that pretraining held out, such as `Finish()` (default: none). The mirror and
            the geometry of the method do not see these rows.
        learning_rates: What the search tries, each above 0. By default those of the method that it is paired with, and
            without one those of `grid_row`.
        grid_row: The row of the recipe's grid with the learning rates. Only needed without `learning_rates`.
        searches_alpha: Whether the search also tries each `alpha_end` of the recipe's grid.
        dampings: Values of the geometry's damping that the search tries, each above 0. It goes on beyond the best of
            them by factors of 10 (default: none, for a method whose damping is fixed).

    Raises:
        ConfigError: If a value is outside its range.

    References:
        Amid et al. (2022), Public Data-Assisted Mirror Descent for Private Model Training, arXiv:2112.00193: the
        registered method "pda" and its baselines.
    """

    geometry: Geometry | Callable[[Conditions], Geometry] | None = None
    centre: Centre | None = None
    mirror: MirrorMap | Callable[[Conditions], MirrorMap] = _PLAIN
    finish: Finish | None = None
    learning_rates: tuple[float, ...] = ()
    grid_row: GridRow | None = None
    searches_alpha: bool = False
    dampings: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        wanted = "letters, digits, '-' and '_', at most 40 of them"
        require(_SLUG.fullmatch(self.name) is not None, "name", self.name, wanted)
        require(self.name != BEST_PRIVATE, "name", self.name, "another name: the verdict uses it for the best method")
        require(self.start in ("public", "random"), "start", self.start, "in ('public', 'random')")
        require(self.against != self.name, "against", self.against, "the name of another method, or None")
        shapes = self.geometry is None or isinstance(self.geometry, Geometry) or callable(self.geometry)
        require(shapes, "geometry", self.geometry, "to be a geometry such as Whitened(), or None")
        ends = self.finish is None or isinstance(self.finish, Finish)
        require(ends, "finish", self.finish, "to be a last step such as Finish(), or None")
        usable = not isinstance(self.mirror, type) and (self._is_map or callable(self.mirror))
        require(usable, "mirror", self.mirror, "to be a map such as FirstOrder(0.9), or a function that returns one")
        require(all(rate > 0 for rate in self.learning_rates), "learning_rates", self.learning_rates, "each above 0")
        require(all(damping > 0 for damping in self.dampings), "dampings", self.dampings, "each above 0")

    @property
    def _is_map(self) -> bool:
        return hasattr(type(self.mirror), "direction")

    @property
    def has_mirror(self) -> bool:
        """Whether the released gradient goes through a map other than the identity."""
        return self.mirror != _PLAIN

    def mirror_at(self, conditions: Conditions) -> MirrorMap:
        """The map of a run.

        Args:
            conditions: Setting and recipe of the run.
        """
        if self._is_map:
            return cast(MirrorMap, self.mirror)
        return cast(Callable[[Conditions], MirrorMap], self.mirror)(conditions)

    def geometry_at(self, conditions: Conditions) -> Geometry | None:
        """The geometry of a run.

        Args:
            conditions: Setting and recipe of the run.
        """
        if self.geometry is None or isinstance(self.geometry, Geometry):
            return self.geometry
        return self.geometry(conditions)

    def rates_in(self, grid: Grid) -> tuple[float, ...]:
        """The learning rates that a search tries.

        Args:
            grid: The recipe's grid.
        """
        rates: tuple[float, ...] = self.learning_rates or getattr(grid, self.grid_row or "warm")
        return rates

    def settings_in(self, grid: Grid) -> list[Setting]:
        """Every point of the grid at which a search trains this method.

        Args:
            grid: The recipe's grid.
        """
        ends = (grid.alpha_end if self.searches_alpha else ()) or (None,)
        dampings = self.dampings or (None,)
        return [Setting(lr, end, damping) for damping in dampings for end in ends for lr in self.rates_in(grid)]

    def middle_of(self, grid: Grid, lr: float | None = None, alpha_end: float | None = None) -> Setting:
        """The setting of a run without a search: what is given, and for the rest the middle of the grid.

        Args:
            grid: The recipe's grid.
            lr: Learning rate (default: the middle one).
            alpha_end: Final alpha (default: the middle one).
        """
        rates = self.rates_in(grid)
        lr = rates[len(rates) // 2] if lr is None else lr
        damping = self.dampings[len(self.dampings) // 2] if self.dampings else None
        if not self.searches_alpha:
            return Setting(lr, damping=damping)
        return Setting(lr, grid.middle_end if alpha_end is None else alpha_end, damping)

    def to_json(self, recipe: Recipe) -> dict[str, Any]:
        """What study.json holds of it, so that a resumed study notices another mirror under the same name.

        Args:
            recipe: The recipe of the study.
        """
        middle = Conditions(setting=self.middle_of(recipe.grid), recipe=recipe)
        mirror, geometry = described(self.mirror_at(middle)), self.geometry_at(middle)
        return {
            "start": self.start,
            "against": self.against,
            "trains": self.trains,
            "description": self.description or mirror,
            "effect": None if self.effect is None else list(self.effect),
            "mirror": mirror,
            "learning_rates": list(self.rates_in(recipe.grid)),
            "searches_alpha": self.searches_alpha,
            **({} if geometry is None else {"geometry": repr(geometry)}),
            **({} if self.centre is None else {"centre": repr(self.centre)}),
            **({"dampings": list(self.dampings)} if self.dampings else {}),
            **({} if self.finish is None else {"finish": repr(self.finish)}),
        }


def _pda_mirror(at: Conditions) -> MirrorMap:
    if at.recipe.damping is not None:
        return Bregman(damping=at.recipe.damping)
    end = at.setting.alpha_end
    if end is None:
        raise ConfigError("Expected alpha_end to be given for the first-order mirror, got None.")
    return FirstOrder(cosine(end=end), public_max_norm=at.recipe.public_max_norm)


def _guarded_mirror(at: Conditions) -> MirrorMap:
    mirror = _pda_mirror(at)
    if not isinstance(mirror, FirstOrder):
        raise ConfigError("Expected a recipe without damping for guarded: FallBack guards the first-order mirror only.")
    return FallBack(mirror)


def _whitened(at: Conditions) -> Geometry:
    damping = at.setting.damping
    return Whitened() if damping is None else Whitened(damping=damping)


PUBLIC = Method(name="public", trains=False, description="trained on public data only")
COLD = Method(name="cold", start="random", grid_row="cold", description="DP-SGD from random weights")
WARM = Method(
    name="warm",
    grid_row="warm",
    against="cold",
    description="DP-SGD from the public model",
    effect=("the public start", "a random start"),
)
PDA = Method(
    name="pda",
    mirror=_pda_mirror,
    grid_row="pda",
    searches_alpha=True,
    against="warm",
    description="warm, with public gradients as the mirror",
    effect=("the mirror", "a warm start without it"),
)
GUARDED = Method(
    name="guarded",
    mirror=_guarded_mirror,
    grid_row="pda",
    searches_alpha=True,
    against="pda",
    description="pda, which lets go of public gradients that oppose the private ones",
    effect=("the guard", "the mirror without it"),
)
WHITENED = Method(
    name="whitened",
    geometry=_whitened,
    dampings=(1.0,),
    grid_row="warm",
    against="warm",
    description="warm, clipped and noised in coordinates from public rows",
    effect=("the geometry", "a warm start without it"),
)

FINISHED = Method(
    name="finished",
    finish=Finish(),
    grid_row="warm",
    against="warm",
    description="warm, with a temperature from held-out public rows",
    effect=("the finish", "a warm start without it"),
)

CENTRED = Method(
    name="centred",
    centre=Centre(),
    grid_row="warm",
    against="warm",
    description="warm, with users' updates clipped around that of public users",
    effect=("the centre", "a warm start without it"),
)

METHODS = (PUBLIC, COLD, WARM, PDA)  # those of a study that names none; study.json says no more of them than the name
REGISTERED: Mapping[str, Method] = {method.name: method for method in (*METHODS, GUARDED, WHITENED, FINISHED, CENTRED)}
NAMES = tuple(method.name for method in METHODS)


def registered(name: str) -> Method:
    """The method of the library with this name.

    Raises:
        ConfigError: If there is none; the message lists those that there are.
    """
    require(name in REGISTERED, "method", name, f"in {tuple(REGISTERED)}")
    return REGISTERED[name]


def resolve(methods: Sequence[Method | str]) -> tuple[Method, ...]:
    """The methods of a study, in the order of its tables: those of the library, then users' own as they were given.

    Raises:
        ConfigError: For an unknown name, two methods of one name, or a method that is paired with none of the others.
    """
    given = [registered(method) if isinstance(method, str) else method for method in methods]
    names = [method.name for method in given]
    require(len(given) > 0, "methods", names, f"one or more, such as some of {tuple(REGISTERED)}")
    require(len(set(names)) == len(names), "methods", names, "each name once")
    by_name = {method.name: method for method in given}
    return tuple(_checked(by_name[name], by_name) for name in in_order(names))


def _checked(method: Method, arms: Mapping[str, Method]) -> Method:
    """The method with the learning rates of its pair where it has none of its own."""
    if method.name in REGISTERED:
        if method != REGISTERED[method.name]:
            raise ConfigError(f"Expected another name than {method.name!r}, which is that of a registered method.")
        return method  # paired if its baseline is there, and else only shown
    against = method.against
    require(against is None or against in arms, f"against of {method.name}", against, f"in {tuple(arms)}, or None")
    if method.learning_rates or method.grid_row:
        return method
    pair = arms.get(against or "")
    for _ in arms:  # at most once through all of them, should they be paired in a circle
        if pair is None or pair.learning_rates or pair.grid_row:
            break
        pair = arms.get(pair.against or "")
    if pair is None:
        return replace(method, grid_row="warm")
    return replace(method, learning_rates=pair.learning_rates, grid_row=pair.grid_row)


def in_order(names: Iterable[str]) -> list[str]:
    """Names in the order of tables and figures: those of registered methods first, then the others as they come."""
    order = list(REGISTERED)
    return sorted(names, key=lambda name: order.index(name) if name in REGISTERED else len(order))


def recorded(methods: Iterable[Method], recipe: Recipe) -> dict[str, Any]:
    """The methods as study.json holds them, under "arms": all but those that every version knows by name."""
    return {method.name: method.to_json(recipe) for method in methods if method not in METHODS}


def arms_of(names: Iterable[str], records: Mapping[str, Any]) -> list[Arm]:
    """The arms of a study in order, from its record and the registry; a name that neither knows is an arm unpaired."""
    return [
        Arm.from_json(name, records[name]) if name in records else REGISTERED.get(name, Arm(name=name))
        for name in in_order(names)
    ]


def pairs_of(arms: Sequence[Arm]) -> list[tuple[Arm, Arm]]:
    """Each arm with the one that it is paired with, where both are there."""
    by_name = {arm.name: arm for arm in arms}
    return [(arm, by_name[arm.against]) for arm in arms if arm.against in by_name]


def private_candidates(arms: Sequence[Arm]) -> list[Arm]:
    """The arms among which the verdict looks for the best private one: those from the public start, or else all."""
    private = [arm for arm in arms if arm.trains]
    return [arm for arm in private if arm.start == "public"] or private


def without_private(arms: Sequence[Arm]) -> Arm | None:
    """The arm that uses public data alone."""
    return next((arm for arm in arms if not arm.trains), None)
