"""Numbers and settings as readers want them: few digits, and a dash for what is not there."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from halfsilver.study.problem import Setting
from halfsilver.study.records import Mean

NONE = "-"


def slug(name: str) -> str:
    """A name for files and ids: its own if small letters, digits and underscores are all it has.

    Any other becomes its readable part and a digest, so two names never share one. None has a hyphen, which may join
    several. Names come from files that may be somebody else's, and as they are they may be paths or markup.

    >>> slug("released_norm"), slug("val/error")
    ('released_norm', 'val_error.e80c4353d66723ede4db11a30c5ee171')
    """
    if re.fullmatch(r"[a-z0-9_]{1,40}", name):
        return name
    words = re.sub(r"[^a-z0-9]+", "_", name[:40].lower()).strip("_")
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{words or 'name'}.{digest}"


def short(name: str) -> str:
    """A name as it is drawn: on one line, in letters, and of a length that leaves room for the figure.

    >>> short("loss"), short("two\\nlines"), len(short("x" * 1000))
    ('loss', 'two lines', 32)
    """
    text = "".join(c if c.isprintable() else " " for c in name)
    return text if len(text) <= 32 else f"{text[:31]}\N{HORIZONTAL ELLIPSIS}"


def figure(value: Any, metric: str = "") -> str:
    """A value of a metric: accuracy in percent, anything else to four digits.

    >>> figure(0.67031, "accuracy"), figure(1.23456, "loss"), figure(None)
    ('67.03 %', '1.2346', '-')
    """
    if not isinstance(value, int | float):
        return NONE
    if not math.isfinite(value):
        return "not finite"
    if "accuracy" in metric:
        return f"{100 * value:.2f} %"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 100 or value == 0 else f"{value:.4g}"


def with_interval(mean: Mean, metric: str) -> tuple[str, str]:
    """The mean and half the width of its interval; no width where one seed gives none.

    >>> with_interval(Mean(mean=0.67, low=0.66, high=0.68), "accuracy"), with_interval(Mean(mean=1.5), "loss")
    (('67.00', '± 1.00 %'), ('1.5000', ''))
    """
    if mean.low is None or mean.high is None or mean.mean is None:
        return figure(mean.mean, metric), ""
    half = figure((mean.high - mean.low) / 2, metric)
    return figure(mean.mean, metric).removesuffix(" %"), f"± {half}"


def level(confidence: float) -> str:
    """That of the verdict's intervals.

    >>> level(0.9)
    '90 %'
    """
    return f"{100 * confidence:g} %"


def points(difference: Any, metric: str) -> str:
    """A difference of two values, signed; of accuracies in percentage points.

    >>> points(-0.0123, "loss"), points(0.0123, "accuracy")
    ('-0.0123', '+1.23 points')
    """
    text = figure(difference, metric).replace(" %", " points")
    return f"+{text}" if isinstance(difference, int | float) and difference > 0 else text


def plain(value: Any) -> str:
    """Any JSON value on one line.

    >>> plain(1e-06), plain(0.1 + 0.2), plain([1, 2.5]), plain(None), plain(True), plain(48_000)
    ('1e-6', '0.3', '1, 2.5', '-', 'yes', '48,000')
    """
    if value is None or value == [] or value == {}:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}".replace("e-0", "e-")
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(item)}" for name, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(plain(item) for item in value)
    return str(value)


def flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """All entries of a JSON object, those of objects inside it under a longer name.

    >>> list(flat({"a": 1, "grid": {"rates": [0.5, 1.0]}}))
    [('a', '1'), ('grid rates', '0.5, 1')]
    """
    for name, item in value.items():
        full = f"{above} {name}".strip().replace("_", " ")
        if isinstance(item, Mapping) and item:
            yield from flat(item, full)
        else:
            yield full, plain(item)


def setting(value: Setting | None) -> str:
    """A point of the grid.

    >>> setting(Setting(0.5, 0.9)), setting(Setting(2.0))
    ('learning rate 0.5, alpha to 0.9', 'learning rate 2')
    """
    if value is None:
        return NONE
    alpha = "" if value.alpha_end is None else f", alpha to {value.alpha_end:g}"
    return f"learning rate {value.lr:g}{alpha}" + ("" if value.damping is None else f", damping {value.damping:g}")


def one_of(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> one_of(["cold", "warm", "pda"])
    'cold, warm or pda'
    """
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
