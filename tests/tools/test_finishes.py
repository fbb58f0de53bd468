"""The table of finishes is that of the committed figures, and a temperature alone keeps the accuracy."""

from __future__ import annotations

import json

from tools import finishes


def test_the_page_has_the_figures() -> None:
    text = finishes.PAGE.read_text(encoding="utf-8")
    assert finishes.page(text) == text, "make it again: python -m tools.finishes"


def test_a_temperature_keeps_the_accuracy_and_lowers_the_loss() -> None:
    paths = sorted((finishes.RESULTS / "finish").glob("finish-*.json"))
    assert paths
    for path in paths:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        assert results["temperature"]["accuracy"] == results["none"]["accuracy"]
        assert results["temperature"]["loss"] < results["none"]["loss"]
