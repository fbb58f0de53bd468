"""`halfsilver report`: a study or a run as one HTML file that needs nothing else, and its figures as PNG and SVG."""

from __future__ import annotations

from pathlib import Path

from halfsilver import _os
from halfsilver.report.figures import run_pictures
from halfsilver.report.load import OneRun, load
from halfsilver.report.run_page import run_page
from halfsilver.report.study_figures import study_pictures
from halfsilver.report.study_page import study_page

__all__ = ["study_pictures", "write_report"]


def write_report(path: str | Path, out: str | Path | None = None) -> Path:
    """Write report.html and figures/ for a study, its summary file or a run folder; return the page's path.

    They go into `out`: by default the folder itself, or beside a summary file a folder of its name. The same results
    make the same files, byte for byte, with the same version of matplotlib.
    """
    path = Path(path)
    found = load(path)
    folder = Path(out) if out is not None else path.with_suffix("") if path.is_file() else path
    pictures = run_pictures(found.history) if isinstance(found, OneRun) else study_pictures(found)
    page = run_page(found, pictures) if isinstance(found, OneRun) else study_page(found, pictures)
    for picture in (one for part in pictures.values() for one in part):
        picture.write(folder / "figures")
    folder.mkdir(parents=True, exist_ok=True)
    _os.write_atomically(folder / "report.html", page.encode())
    return folder / "report.html"
