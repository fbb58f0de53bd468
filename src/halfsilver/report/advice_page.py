"""The page of an advice: each recommendation in words, with the figure that it comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfsilver._core import system
from halfsilver.report.figures import Picture, inside, line, picture
from halfsilver.report.looks import ACCENT
from halfsilver.report.page import Html, facts, page, section, tag
from halfsilver.report.parts import gallery
from halfsilver.report.plots import INK, PALETTE

if TYPE_CHECKING:
    from halfsilver.study.advice import Advice


def write_advice(advice: Advice, out: str | Path) -> Path:
    """Write an advice as one HTML page that works offline, and its figures as PNG and SVG.

    Args:
        advice: What `advise` returned.
        out: The folder for ``advice.html`` and ``figures/``.

    Returns:
        The path of the page.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    from halfsilver.study.advice import in_words

    pictures = [_batches(advice), _norms(advice), _rates(advice), _more(advice)]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for one in pictures:
        one.write(inside(folder, "figures"))
    words = in_words(advice)
    lead = (
        f"{advice.plan.steps} steps of {advice.plan.expected_batch_size:g} records, clip norm "
        f"{advice.plan.max_grad_norm:.3g}, {advice.optimizer} at {advice.learning_rate:.3g}, "
        f"{'no geometry' if advice.geometry is None else 'in coordinates from public rows'}."
    )
    html: Html = page(
        "Advice - halfsilver",
        tag("h1", "Advice for a private run"),
        tag("p", lead, class_="verdict"),
        tag("p", "It comes from public rows alone, so it costs no privacy."),
        section("why", "What, and why", facts(words.items())),
        section("figures", "Where it comes from", gallery(pictures)),
    )
    system.write_atomically(folder / "advice.html", html.encode())
    return folder / "advice.html"


def _batches(advice: Advice) -> Picture:
    chosen = advice.plan.expected_batch_size

    def paint(axes: Any) -> None:
        line(axes, ACCENT, [(b.batch_size, b.noise) for b in advice.batches], "noise", marker="o", markevery=1)
        axes.axvline(chosen, color=INK, linewidth=1, linestyle=":")
        _log_scale(axes, [b.batch_size for b in advice.batches][:: math.ceil(len(advice.batches) / 5)])
        axes.set(xlabel="records per step", ylabel="noise, as a multiple of the least")
        axes.set_ylim(0.95, None)

    return picture(
        "batches",
        paint,
        title="Batch",
        caption=f"Noise at the end of the run at this epsilon and compute. Advised (dotted): {chosen:g} records.",
        alt=f"Noise at the end of the run against the batch size; advised {chosen:g}.",
    )


def _norms(advice: Advice) -> Picture:
    clip = advice.plan.max_grad_norm

    def paint(axes: Any) -> None:
        axes.set_axisbelow(True)
        axes.hist(advice.norms, bins=30, color=PALETTE["arm-4"], alpha=0.8)
        axes.axvline(clip, color=INK, linewidth=1, linestyle=":")
        axes.set(xlabel="gradient norm", ylabel="held-out public rows")

    return picture(
        "norms",
        paint,
        title="Clip norm",
        caption=f"Gradient norms of {len(advice.norms)} held-out rows at the start. Advised (dotted): {clip:.3g}.",
        alt=f"Histogram of gradient norms, with the clip norm {clip:.3g}.",
    )


def _rates(advice: Advice) -> Picture:
    """Losses far above that of the start are left out: they would flatten the rest."""
    most = 1.5 * advice.start.held_out_loss
    kinds = sorted({t.kind for t in advice.tried}, reverse=True)
    colours = (PALETTE["arm-3"], PALETTE["arm-4"], PALETTE["arm-5"])

    def paint(axes: Any) -> None:
        for kind, colour in zip(kinds, colours, strict=False):
            points = sorted((t.learning_rate, t.loss) for t in advice.tried if t.kind == kind and math.isfinite(t.loss))
            shown = [(rate, loss) for rate, loss in points if loss <= most] or points[:1]
            label = kind[0] if kind[1] else f"{kind[0]}, whitened"
            axes.plot(*zip(*shown, strict=True), label=label, color=colour, marker="o", markersize=4)
        axes.axhline(advice.start.held_out_loss, color=INK, linewidth=1, linestyle=":")
        rates = [math.log10(t.learning_rate) for t in advice.tried]
        _log_scale(axes, [10.0**k for k in range(math.floor(min(rates)), math.ceil(max(rates)) + 1)])
        axes.set(xlabel="learning rate", ylabel="public loss")

    return picture(
        "rates",
        paint,
        title="Learning rate, optimizer and geometry",
        caption=f"Rehearsals of {advice.rehearsed_steps} steps under the plan's noise: the middle between the loss of "
        "rows that they trained on and that of others. Dotted: the start.",
        alt="Public loss against the learning rate, one line per optimizer and geometry.",
    )


def _more(advice: Advice) -> Picture:
    names = list(advice.less_noise)

    def paint(axes: Any) -> None:
        axes.set_axisbelow(True)
        axes.barh(names, [advice.less_noise[name] for name in names], color=PALETTE["arm-4"], height=0.5)
        axes.invert_yaxis()
        axes.set(xlabel="share of the noise that is left", xlim=(0, 1))

    return picture(
        "more",
        paint,
        title="What more would bring",
        caption="Noise at the end of the run, as a share of that of the advised run.",
        alt="; ".join(f"{name}: {advice.less_noise[name]:.2f} of the noise" for name in names),
    )


def _log_scale(axes: Any, ticks: Sequence[float]) -> None:
    """A logarithmic axis with these ticks, written out: powers are markup, which figures here do not read."""
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
