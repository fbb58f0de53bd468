"""`halfsilver report`: a study or a run as one self-contained HTML file, and its figures as PNG and SVG."""

from __future__ import annotations

from pathlib import Path

from halfsilver._core import system
from halfsilver.report.advice_page import write_advice
from halfsilver.report.figures import Picture, inside, run_pictures
from halfsilver.report.load import OneRun, load, shown
from halfsilver.report.run_page import run_page
from halfsilver.report.statement_page import PlainStatement, write_statement
from halfsilver.report.study_figures import study_pictures
from halfsilver.report.study_page import study_page
from halfsilver.study.records import Summary

__all__ = ["PlainStatement", "study_pictures", "write_advice", "write_report", "write_statement"]


def write_report(path: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a study or a run: one HTML page, and its figures as PNG and SVG.

    The same results give the same files, byte for byte, with the same version of matplotlib.

    Guarantee: whatever names and links the folder holds, no file is written outside `out`, and no name becomes markup.

    Args:
        path: The folder of a study, its summary file, or the folder of a run.
        out: The folder for ``report.html`` and ``figures/``. Default None, which means the folder itself or, for a
            summary file, a folder of its name beside it.

    Returns:
        The path of the page.

    Raises:
        ConfigError: If `path` is none of these.
        CheckpointCorrupt: If its files hold values that cannot be shown.
        MissingExtra: If matplotlib is not installed.

    Example:
        >>> import tempfile
        >>> import torch
        >>> import halfsilver as hs
        >>> loss_fn = lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]).square()
        >>> model = torch.nn.Linear(3, 1)
        >>> plan = hs.PrivacyPlan(steps=5, sampling_rate=0.5, expected_batch_size=100, noise_multiplier=1.0)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = hs.Trainer(model, loss_fn, optimizer=sgd, plan=plan)
        >>> run = trainer.fit((torch.randn(200, 3), torch.randn(200)), run_dir=tempfile.mkdtemp() + "/run", delta=1e-5)
        >>> write_report(run.run_dir).name
        'report.html'
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
