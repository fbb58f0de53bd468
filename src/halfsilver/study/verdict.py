"""What a study shows, in words that state their numbers and claim nothing that is within noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from halfsilver.errors import require
from halfsilver.study import paired
from halfsilver.study.paired import MIRROR, PRIVATE, START, Difference, Diverged
from halfsilver.study.problem import METHODS, better

_SUBJECTS = {  # who does it, and against what
    PRIVATE: ("private training", "public training alone"),
    START: ("the public start", "a random start"),
    MIRROR: ("the mirror", "a warm start without it"),
}
_NO_GAIN = {  # by whether a gain was measured at all
    False: "private data add nothing beyond public training here",
    True: "private data show no gain beyond noise over public training here",
}


def verdict(runs: Sequence[Mapping[str, Any]], *, confidence: float = 0.95) -> dict[str, Any]:
    """Means, paired differences and plain sentences about the results (`result.json`) of one study.

    Differences are paired by seed, with a two-sided Student t-interval for each comparison on its own. One seed gives
    no interval and no claim. A run with a figure that is not finite has diverged: it is named, enters no mean, and
    no comparison that it is missing from is called beyond noise. A seed may appear once for each method.
    """
    require(0 < confidence < 1, "confidence", confidence, "in (0, 1)")
    seen = [(r["method"], r["seed"]) for r in runs]
    require(len(set(seen)) == len(seen), "runs", sorted(seen), "one for each method and seed")
    lost = paired.diverged(runs)
    values = {metric: paired.by_method(runs, metric, lost) for metric in paired.metrics(runs)}
    found = list(paired.differences(values, lost, confidence))
    methods = sorted({m for m, _ in seen}, key=lambda m: (*METHODS, m).index(m))
    return {
        "headline": _headline(found, lost),
        "sentences": [*_changes(found, confidence), *_gaps(found, methods, lost), *_notes(found, confidence)],
        "differences": [asdict(d) for d in found],
        "means": {
            m: {k: paired.mean_with_interval(v.get(m, {}), confidence) for k, v in values.items()} for m in methods
        },
        "diverged": [{"method": m, "seed": s} for m, seeds in lost.items() for s in seeds],
        "confidence": confidence,
    }


def _good(d: Difference) -> int:
    """1 for a change to the better, -1 to the worse, 0 for none or where nobody knows which way is better."""
    sign = better(d.metric)
    return sign * ((d.mean > 0) - (d.mean < 0))


def _changes(found: Sequence[Difference], confidence: float) -> Iterator[str]:
    for d in sorted(found, key=lambda d: list(_SUBJECTS).index(d.name)):
        yield _capital(_change(d, confidence))


def _change(d: Difference, confidence: float) -> str:
    subject, against = _SUBJECTS[d.name]
    who = f"{subject} ({d.method})" if d.name == PRIVATE else subject
    if d.low is None or d.high is None:
        seeds = "1 paired seed" if d.n == 1 else f"{d.n} paired seeds that happen to agree"
        return f"{who} {_moves(d)} against {against}, on {seeds}: no interval.{_left_out(d)}"
    over = f"over {d.n} paired seeds"
    if not d.within_noise:
        low, high = sorted((abs(d.low), abs(d.high)))
        ends = f"{100 * confidence:g} % interval {_range(low, high, d.metric)} {over}"
        return f"{who} {_moves(d)} against {against}, {ends}: beyond noise."
    size = _amount(d.mean, d.metric, signed=True) + _percent(d, signed=True)
    ends = f"{100 * confidence:g} % interval {_range(d.low, d.high, d.metric, signed=True)} {over}"
    if d.lost:
        return f"{who} against {against}, test {d.metric}: measured change {size}, {ends}.{_left_out(d)}"
    moved = f"{who} changes test {d.metric} against {against} within noise only"
    return f"{moved}: measured change {size}, {ends}, which includes 0."


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


def _gaps(found: Sequence[Difference], methods: Sequence[str], lost: Diverged) -> Iterator[str]:
    """What cannot be said, and why."""
    for method, seeds in lost.items():
        which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        yield f"Diverged: {method} with {which}. Its means leave that out; try a smaller learning rate."
    known = {d.name for d in found}
    for name in (START, MIRROR):
        if set(name.split(" - ")) <= set(methods) and name not in known:
            yield f"Not known: {name}. No seed has a finished run of both."


def _notes(found: Sequence[Difference], confidence: float) -> Iterator[str]:
    """Advice, and what the intervals are not."""
    nothing = _nothing([d for d in found if d.name == PRIVATE])
    if nothing:
        yield f"{_capital(nothing)}: do not spend epsilon on them unless more seeds show a gain."
    if any(d.n == 1 for d in found):
        yield "One seed: no interval; run more seeds."
    if any(d.low is not None for d in found):
        share = f"{_number(100 * (1 - confidence), signed=False)} %"
        yield f"Intervals are over seeds on the same data, each on its own: by chance, each misses in {share} of cases."
    if any(d.level > confidence and d.low is not None for d in found):
        yield "That of private training is widened, because warm or pda was picked by these same figures."


def _nothing(private: Sequence[Difference]) -> str:
    """Words for it where no figure gains from private data: beyond noise if there are intervals, at all if not."""
    gains = [d for d in private if _good(d) > 0]
    if not private or any(d.lost for d in private) or any(d.low is None or not d.within_noise for d in gains):
        return ""
    return _NO_GAIN[bool(gains)]


def _headline(found: Sequence[Difference], lost: Diverged) -> str:
    """One sentence about the loss: private data, then the mirror."""
    parts = [_clause(d, found) for name in (PRIVATE, MIRROR) for d in found if (d.name, d.metric) == (name, "loss")]
    if lost:
        count = sum(len(seeds) for seeds in lost.values())
        parts.insert(0, f"{count} run{'s' if count > 1 else ''} diverged ({', '.join(lost)})")
    shown = [d for d in found if d.name != START and d.metric == "loss"]
    alone = ": one seed cannot tell effect from noise" if shown and all(d.n == 1 for d in shown) else ""
    return _capital("; ".join(parts) or "there are no two methods with a seed in common to compare") + alone + "."


def _clause(d: Difference, found: Sequence[Difference]) -> str:
    subject, against = _SUBJECTS[d.name]
    same = [o for o in found if o.name == d.name]
    if d.name == PRIVATE and d.within_noise and _nothing(same):
        return _nothing(same)
    if d.low is None:
        return f"{subject} {_moves(d)} against {against} on {'one seed' if d.n == 1 else 'seeds that happen to agree'}"
    if d.lost:
        return f"what {subject} changes against {against} is not known"
    if d.within_noise:
        text, other = f"{subject} changes test loss against {against} within noise only", [-1, 1]
    else:
        text, other = f"{subject} {_moves(d)} against {against}, beyond noise", [-_good(d)]
    apart = [_moves(o) for o in same if not o.within_noise and o.metric != "loss" and _good(o) in other]
    return text + "".join(f", but {moves}, beyond noise" for moves in apart)
