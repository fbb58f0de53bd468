"""`halfsilver report`: a study or a run as one HTML file that needs nothing else, and its figures as PNG and SVG."""

from __future__ import annotations

from pathlib import Path

from halfsilver._core import system
from halfsilver.report.figures import Picture, inside, run_pictures
from halfsilver.report.load import OneRun, load, shown
from halfsilver.report.run_page import run_page
from halfsilver.report.study_figures import study_pictures
from halfsilver.report.study_page import study_page
from halfsilver.study.records import Summary

__all__ = ["study_pictures", "write_report"]


def write_report(path: str | Path, out: str | Path | None = None) -> Path:
    """Write report.html and figures/ for a study, its summary file or a run folder; return the page's path.

    They go into `out`: by default the folder itself, or beside a summary file a folder of its name. The same results
    make the same files, byte for byte, with the same version of matplotlib.

    Guarantee: whatever names and links the folder holds, no file is written outside `out`, and no name becomes markup.
    """
    path = Path(path)
    source = load(path)
    folder = Path(out) if out is not None else path.with_suffix("") if path.is_file() else path
    with shown(path):
        page, pictures = _drawn(source)
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        picture.write(inside(folder, "figures"))
    system.write_atomically(folder / "report.html", page.encode(errors="replace"))  # JSON has text that UTF-8 has not
    return folder / "report.html"


def _drawn(source: Summary | OneRun) -> tuple[str, list[Picture]]:
    """The page and its figures."""
    if isinstance(source, OneRun):
        parts = run_pictures(source.history)
        page = run_page(source, parts)
    else:
        parts = study_pictures(source)
        page = study_page(source, parts)
    return page, [one for pictures in parts.values() for one in pictures]
