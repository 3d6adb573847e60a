"""Prints tables, whose first row is the header."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

WIDTH = 160


def show(title: str, rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Prints a table; numbers are aligned at the right."""
    header, *body = rows
    table = Table(title=title, caption=caption or None, caption_justify="left")
    for number, column in enumerate(header):
        table.add_column(column, justify="right" if number else "left")
    for cells in body:
        table.add_row(*cells)
    Console(width=WIDTH).print(table, highlight=False)
