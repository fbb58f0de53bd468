"""How the methods of a study look in its figures: a colour, dashes and a mark each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from halfsilver.report.plots import INK, PALETTE
from halfsilver.study.method import REGISTERED, in_order

_LINES = (
    ("--", ""), ("-.", "o"), ("-", "s"), ("-", "^"), ("--", "v"),
    (":", "P"), ("-.", "X"), ("-", "*"), ("--", "D"), (":", "h"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Look:
    """Of one method. `variable` is the CSS variable of its colour, which a dark page makes lighter."""

    colour: str
    variable: str = ""
    dashes: str = "-"
    marker: str = "o"


OTHER = Look(colour=INK)  # of methods beyond the palette
_LOOKS = tuple(
    Look(colour=colour, variable=variable, dashes=dashes, marker=marker)
    for (variable, colour), (dashes, marker) in zip(PALETTE.items(), _LINES, strict=True)
)
GREY, ACCENT = _LOOKS[0], _LOOKS[3]


def looks_of(methods: Iterable[str]) -> Mapping[str, Look]:
    """A registered method looks the same in every study; others take what is left, in their order."""
    names = in_order(dict.fromkeys([*REGISTERED, *methods]))
    return {name: _LOOKS[place] if place < len(_LOOKS) else OTHER for place, name in enumerate(names)}
