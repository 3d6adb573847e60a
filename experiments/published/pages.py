"""Finds the markers of a page, and writes what their functions return."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

CALL = r"(\w+)\.(\w+)((?: [^\s>]+)*)"  # module, function, arguments
NUMBER = re.compile(rf"([^\s*|()<>]+)(<!-- {CALL} -->)")
TABLE = re.compile(rf"(<!-- table: {CALL} -->\n)(.*?)(<!-- end of table -->)", re.S)


def corrected(text: str) -> str:
    """The text of a page with its numbers and tables as their results files have them."""
    text = NUMBER.sub(lambda m: f"{_call(*m.group(3, 4, 5))}{m[2]}", text)
    return TABLE.sub(lambda m: m[1] + markdown(_call(*m.group(2, 3, 4))) + m[6], text)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, the first row being its header."""
    header, *rest = rows
    lines = [header, ["---"] * len(header), *rest]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _call(module: str, function: str, arguments: str) -> Any:
    found = importlib.import_module(f"experiments.published.{module}")
    return getattr(found, function)(*arguments.split())
