"""What a study shows, in words that state their numbers and claim nothing that is within noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from halfsilver.errors import require
from halfsilver.study import paired
from halfsilver.study.method import Arm, arms_of, pairs_of, without_private
from halfsilver.study.paired import Diverged, Values
from halfsilver.study.problem import better
from halfsilver.study.records import Difference, Result, Verdict

_PRIVATE = ("private training", "public training alone")
_NO_GAIN = {  # by whether a gain was measured at all
    False: "private data add nothing beyond public training here",
    True: "private data show no gain beyond noise over public training here",
}


def verdict(runs: Sequence[Result], arms: Sequence[Arm] | None = None, *, confidence: float = 0.95) -> Verdict:
    """Means, paired differences and plain sentences about the results of one study.

    Differences are paired by seed, with a two-sided Student t-interval for each comparison on its own. One seed gives
    no interval and no claim. A run with a figure that is not finite has diverged: it is named, enters no mean, and
    no comparison that it is missing from is called beyond noise. A seed may appear once for each method.

    Args:
        runs: One result for each method and seed.
        arms: The methods, which say what is paired with what. By default the registered ones of the runs' names.
        confidence: That of the intervals, in (0, 1).
    """
    require(0 < confidence < 1, "confidence", confidence, "in (0, 1)")
    keys = [(run.method, run.seed) for run in runs]
    require(len(set(keys)) == len(keys), "runs", sorted(keys), "one for each method and seed")
    names = {name for name, _ in keys}
    shown = [arm for arm in (arms_of(sorted(names), {}) if arms is None else arms) if arm.name in names]
    lost = paired.diverged(runs)
    values = {metric: paired.by_method(runs, metric, lost) for metric in paired.metrics(runs)}
    words = _Words(shown, values, lost, tuple(paired.differences(shown, values, lost, confidence)), confidence)
    return Verdict(
        headline=words.headline(),
        sentences=[*words.changes(), *words.gaps(), *words.notes()],
        differences=words.differences,
        means={
            arm.name: {k: paired.mean_with_interval(v.get(arm.name, {}), confidence) for k, v in values.items()}
            for arm in shown
        },
        diverged=[{"method": method, "seed": seed} for method, seeds in lost.items() for seed in seeds],
        confidence=confidence,
    )


@dataclass(frozen=True)
class _Words:
    """The sentences about the differences of one study."""

    arms: Sequence[Arm]
    values: Mapping[str, Values]
    lost: Diverged
    differences: Sequence[Difference]
    confidence: float

    @property
    def private(self) -> str:
        """The name of the difference that private data make."""
        public = without_private(self.arms)
        return "" if public is None else paired.private_pair(public)

    def subjects(self, d: Difference) -> tuple[str, str]:
        if d.name == self.private:
            return _PRIVATE
        return next(arm.subjects for arm in self.arms if arm.pair == d.name)

    def changes(self) -> Iterator[str]:
        order = [self.private, *(arm.pair for arm in self.arms)]
        for d in sorted(self.differences, key=lambda d: order.index(d.name)):
            yield _capital(self._change(d))

    def _change(self, d: Difference) -> str:
        subject, against = self.subjects(d)
        who = f"{subject} ({d.method})" if d.name == self.private else subject
        if d.low is None or d.high is None:
            seeds = "1 paired seed" if d.n == 1 else f"{d.n} paired seeds that happen to agree"
            return f"{who} {_moves(d)} against {against}, on {seeds}: no interval.{_left_out(d)}"
        over = f"over {d.n} paired seeds"
        if not d.within_noise:
            low, high = sorted((abs(d.low), abs(d.high)))
            ends = f"{100 * self.confidence:g} % interval {_range(low, high, d.metric)} {over}"
            return f"{who} {_moves(d)} against {against}, {ends}: beyond noise."
        size = _amount(d.mean, d.metric, signed=True) + _percent(d, signed=True)
        ends = f"{100 * self.confidence:g} % interval {_range(d.low, d.high, d.metric, signed=True)} {over}"
        if d.lost:
            return f"{who} against {against}, test {d.metric}: measured change {size}, {ends}.{_left_out(d)}"
        moved = f"{who} changes test {d.metric} against {against} within noise only"
        return f"{moved}: measured change {size}, {ends}, which includes 0."

    def gaps(self) -> Iterator[str]:
        """What cannot be said, and why."""
        for method, seeds in self.lost.items():
            which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
            yield f"Diverged: {method} with {which}. Its means leave that out; try a smaller learning rate."
        known = {d.name for d in self.differences}
        for arm, _ in pairs_of(self.arms):
            if arm.pair not in known:
                yield f"Not known: {arm.pair}. No seed has a finished run of both."

    def notes(self) -> Iterator[str]:
        """Advice, and what the intervals are not."""
        nothing = _nothing([d for d in self.differences if d.name == self.private])
        if nothing:
            yield f"{_capital(nothing)}: do not spend epsilon on them unless more seeds show a gain."
        if any(d.n == 1 for d in self.differences):
            yield "One seed: no interval; run more seeds."
        if any(d.low is not None for d in self.differences):
            share = f"{_number(100 * (1 - self.confidence), signed=False)} %"
            yield (
                "Intervals are over seeds on the same data, each on its own: by chance, each misses in "
                f"{share} of cases."
            )
        if any(d.level > self.confidence and d.low is not None for d in self.differences):
            *first, last = reversed(paired.finished_candidates(self.arms, self.values))
            one_of = f"{', '.join(first)} or {last}"
            yield f"That of private training is widened, because {one_of} was picked by these same figures."

    def headline(self) -> str:
        """One sentence about the loss: private data, then each method against its pair from the same start."""
        alike = {arm.pair for arm, baseline in pairs_of(self.arms) if arm.start == baseline.start}
        shown = [d for d in self.differences if d.metric == "loss" and d.name in {self.private, *alike}]
        parts = [self._clause(d) for d in shown]
        if self.lost:
            count = sum(len(seeds) for seeds in self.lost.values())
            parts.insert(0, f"{count} run{'s' if count > 1 else ''} diverged ({', '.join(self.lost)})")
        alone = ": one seed cannot tell effect from noise" if shown and all(d.n == 1 for d in shown) else ""
        return _capital("; ".join(parts) or "there are no two methods with a seed in common to compare") + alone + "."

    def _clause(self, d: Difference) -> str:
        subject, against = self.subjects(d)
        same = [other for other in self.differences if other.name == d.name]
        if d.name == self.private and d.within_noise and _nothing(same):
            return _nothing(same)
        if d.low is None:
            seeds = "one seed" if d.n == 1 else "seeds that happen to agree"
            return f"{subject} {_moves(d)} against {against} on {seeds}"
        if d.lost:
            return f"what {subject} changes against {against} is not known"
        if d.within_noise:
            text, other_way = f"{subject} changes test loss against {against} within noise only", [-1, 1]
        else:
            text, other_way = f"{subject} {_moves(d)} against {against}, beyond noise", [-_good(d)]
        apart = [_moves(o) for o in same if not o.within_noise and o.metric != "loss" and _good(o) in other_way]
        return text + "".join(f", but {moves}, beyond noise" for moves in apart)


def _good(d: Difference) -> int:
    """1 for a change to the better, -1 to the worse, 0 for none or where nobody knows which way is better."""
    sign = better(d.metric)
    return sign * ((d.mean > 0) - (d.mean < 0))


def _left_out(d: Difference) -> str:
    return f" Diverged and left out: {', '.join(d.lost)}; so nothing is claimed." if d.lost else ""


def _moves(d: Difference) -> str:
    """'lowers test loss by 0.041 (7.2 %)'."""
    if d.mean == 0:
        return f"leaves test {d.metric} as it is"
    return f"{'lowers' if d.mean < 0 else 'raises'} test {d.metric} by {_amount(abs(d.mean), d.metric)}{_percent(d)}"


def _amount(value: float, metric: str, *, signed: bool = False) -> str:
    """Accuracies, which are shares of 1, in points of 100."""
    return _number(100 * value, signed=signed) + " points" if "accuracy" in metric else _number(value, signed=signed)


def _range(low: float, high: float, metric: str, *, signed: bool = False) -> str:
    start = _amount(low, metric, signed=signed).removesuffix(" points")
    return f"{start} to {_amount(high, metric, signed=signed)}"


def _percent(d: Difference, *, signed: bool = False) -> str:
    if d.relative is None or "accuracy" in d.metric:  # per cent of a percentage would be misread
        return ""
    return f" ({_number(100 * d.relative if signed else 100 * abs(d.relative), signed=signed)} %)"


def _number(value: float, *, signed: bool) -> str:
    text = f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"
    return f"+{text}" if signed and value > 0 else text


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _nothing(private: Sequence[Difference]) -> str:
    """Words for it where no figure gains from private data: beyond noise if there are intervals, at all if not."""
    gains = [d for d in private if _good(d) > 0]
    if not private or any(d.lost for d in private) or any(d.low is None or not d.within_noise for d in gains):
        return ""
    return _NO_GAIN[bool(gains)]
