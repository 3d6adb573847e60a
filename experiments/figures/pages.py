"""The pages, and the figures in them: found, compared with what is declared, corrected.

A declared sentence matches a page whatever its line breaks. Its format fields match any number, so
that a wrong one is found and reported instead of a missing sentence.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/*.md", "coat_jax/configs/*.py")

NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
UNITS = (
    "%|ms|us|ns|seconds?|minutes?|hours?|[KMG]i?B|GB|bytes?|U|times|TB/s|TFLOP/s|tokens/s"
    "|tokens a second"
)
WORDS = "two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|hundred|thousand|million"
FIGURE = re.compile(
    rf"(?<![\w./-])(?:{NUMBER}(?:\s*(?:to|-|and|or)\s+{NUMBER})?\s*(?:{UNITS})(?![\w/])"
    rf"|\d[\d,]*\.\d+(?!\w|\.\d|-\d)|\d{{1,3}}(?:,\d{{3}})+(?!\w)"
    rf"|(?:{WORDS})\s+(?:times|percent|%))"
)
CODE = re.compile(r"```.*?```|`[^`\n]*`|^(?: {4}|\t)[^\n]*|\]\([^)]*\)|<!--.*?-->", re.S | re.M)
FIELD = re.compile(r"\{(:[^}]*)?\}")

Value = float | str


class Sentence(NamedTuple):
    """Part of a sentence of a page; `values` computes what its format fields must show."""

    page: str
    pattern: str
    values: Callable[[], Sequence[Value]]


class Given(NamedTuple):
    """Words of a page with figures that are not results, and why they stand there."""

    page: str
    words: str
    reason: str


class Table(NamedTuple):
    """A table of a page, between `<!-- table: name -->` and `<!-- end of table -->`."""

    page: str
    name: str
    rows: Callable[[], list[list[str]]]


def names() -> list[str]:
    """The pages, as paths within the repository."""
    paths = (path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern)))
    return [str(path.relative_to(ROOT)) for path in paths]


def prose(page: str, text: str) -> str:
    """The text with everything that is no prose blanked: code, addresses, comments.

    Positions stay as they are. Of a Python file, only its docstring is prose.
    """
    if page.endswith(".py"):
        docstring = ast.get_docstring(ast.parse(text), clean=False) or ""
        start = text.index(docstring)
        text = " " * start + docstring
    return CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def compare(
    page: str,
    text: str,
    sentences: Sequence[Sentence],
    tables: Sequence[Table],
    given: Sequence[Given],
) -> tuple[str, list[str]]:
    """The corrected text of a page, and what was wrong with it."""
    errors: list[str] = []
    replaced: list[tuple[int, int, str]] = []
    declared: list[tuple[int, int]] = []
    for sentence in (s for s in sentences if s.page == page):
        found = list(_expression(sentence.pattern).finditer(text))
        if len(found) != 1:
            errors.append(f"{page}: {len(found)} times instead of once: {sentence.pattern!r}")
            continue
        declared.append(found[0].span())
        for place, shown in enumerate(_shown(sentence), 1):
            if found[0][place] != shown:
                errors.append(
                    f"{page}: {found[0][place]} should be {shown} in {sentence.pattern!r}"
                )
                replaced.append((*found[0].span(place), shown))
    for table in (t for t in tables if t.page == page):
        block = re.search(rf"<!-- table: {table.name} -->\n(.*?)<!-- end of table -->", text, re.S)
        if block is None:
            errors.append(f"{page}: no place for the table {table.name!r}")
            continue
        declared.append(block.span())
        expected = _markdown(table.rows())
        if block[1] != expected:
            errors.append(f"{page}: the table {table.name!r} differs from its results")
            replaced.append((*block.span(1), expected))
    for entry in (g for g in given if g.page == page):
        places = [m.span() for m in _expression(entry.words, fields=False).finditer(text)]
        if not places:
            errors.append(f"{page}: given, but not there: {entry.words!r}")
        declared += places
    errors += [
        f"{page}: no parent is declared of {words!r}" for words in _orphans(page, text, declared)
    ]
    for start, stop, new in sorted(replaced, reverse=True):
        text = text[:start] + new + text[stop:]
    return text, errors


def _orphans(page: str, text: str, declared: list[tuple[int, int]]) -> Iterator[str]:
    for found in FIGURE.finditer(prose(page, text)):
        inside = (start <= found.start() and found.end() <= stop for start, stop in declared)
        if not any(inside):
            line = text.count("\n", 0, found.start()) + 1
            yield f"line {line}: {' '.join(found[0].split())}"


def _expression(pattern: str, *, fields: bool = True) -> re.Pattern[str]:
    """Words as a regular expression: any white space, and numbers in place of fields."""
    pieces = FIELD.sub("\0", pattern).split("\0") if fields else [pattern]
    escaped = (r"\s+".join(map(re.escape, re.split(r"\s+", piece))) for piece in pieces)
    return re.compile(f"({NUMBER})".join(escaped))


def _shown(sentence: Sentence) -> list[str]:
    formats = [field[1] or "" for field in FIELD.finditer(sentence.pattern)]
    values = sentence.values()
    return [f"{{{form}}}".format(value) for form, value in zip(formats, values, strict=True)]


def _markdown(rows: list[list[str]]) -> str:
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)
