"""The table of engines and cells says what the adapters say."""

from __future__ import annotations

from engines_table import PAGE, page


def test_the_table_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run: python tests/engines_table.py"
