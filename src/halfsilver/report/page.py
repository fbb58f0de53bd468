"""HTML that is escaped unless it was made here, and the page around it: one file, no scripts, no other files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from halfsilver.report.plots import INK, PALETTE

_VOID = ("meta",)

# Its own style, and nothing from elsewhere: were a name ever to become markup, it could neither run nor load anything.
_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'"


class Html(str):
    """Text that is markup already. Plain `str` is escaped by `tag` and all that is built on it."""


def tag(name: str, /, *content: str, **attributes: str) -> Html:
    """An element; a trailing underscore in an attribute's name is dropped, others become hyphens.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    names = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    opened = f"<{name}" + "".join(f' {key}="{escape(value)}"' for key, value in names) + ">"
    return Html(opened if name in _VOID else f"{opened}{join(content)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """One after the other, with what is not markup escaped; a number and its % stay on one line."""
    return Html("".join(part if isinstance(part, Html) else escape(part).replace(" %", "&nbsp;%") for part in parts))


def page(title: str, *sections: str) -> Html:
    """The whole document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        Html(f"<style>\n{_css()}</style>"),
    )
    return Html(f"<!DOCTYPE html>\n{tag('html', head, tag('body', tag('main', *sections)), lang='en')}\n")


def section(name: str, heading: str, *content: str) -> Html:
    """A part of the page with its heading; nothing at all if it has no content."""
    return tag("section", tag("h2", heading), *content, id=name) if any(content) else Html("")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> Html:
    """A table in a box of its own, inside which it scrolls where the screen is narrow."""
    top = tag("tr", *(tag("th", text, scope="col") for text in header))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    whole = tag("table", tag("thead", top), tag("tbody", *body), class_="numbers" if numbers else "words")
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {', '.join(header)}")


def facts(rows: Iterable[tuple[str, str]]) -> Html:
    """Names and values, one pair to a line."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in rows))


def warning(heading: str, items: Iterable[str]) -> Html:
    """A box that nobody overlooks; nothing if there is nothing to say."""
    found = [tag("li", item) for item in items]
    return tag("div", tag("strong", heading), tag("ul", *found), class_="warning", role="note") if found else Html("")


def more(summary: str, *content: str) -> Html:
    """What is shown when asked for."""
    return tag("details", tag("summary", summary), *content)


def inline(svg: str, *, name: str, alt: str) -> Html:
    """A figure as part of the page: its colours follow the page's, and its ids are its own.

    >>> inline('<?xml?><svg id="a"><use href="#a"/></svg>', name="loss", alt="x < y")
    '<svg role="img" aria-label="x &lt; y" id="loss-a"><use href="#loss-a"/></svg>'
    """
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<(metadata|style)\b.*?</\1>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace("fill: #ffffff", "fill: none").replace(INK, "currentColor")
    for variable, colour in PALETTE.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return Html(svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1))


def _css() -> str:
    light = "".join(f"--{variable}: {colour};" for variable, colour in PALETTE.items())
    own = (files("halfsilver.report") / "page.css").read_text(encoding="utf-8")
    return f":root {{ {light} }}\n{own}"
