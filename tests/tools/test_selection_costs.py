"""The page on selections shows the table that its command prints."""

from tests.markdown import ROOT
from tools.selection_costs import table


def test_the_table_of_the_page_is_what_the_command_prints() -> None:
    assert f"\n{table()}\n" in (ROOT / "docs" / "select.md").read_text(encoding="utf-8")
