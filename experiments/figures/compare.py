"""The figures of a page: found, compared with what is declared, corrected.

A declared sentence matches a page whatever its line breaks. Its format fields match any number, so
that a wrong one is found and reported instead of a missing sentence.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/*.md")
CONVERTED = (  # to the markers of experiments.published
    "README.md",
    "docs/architecture.md",
    "docs/checkpoints.md",
    "docs/clusters.md",
    "docs/coming_from.md",
    "docs/compressed_optax.md",
    "docs/data.md",
    "docs/evaluation.md",
    "docs/examples.md",
    "docs/extending.md",
    "docs/formats.md",
    "docs/generation.md",
    "docs/index.md",
    "docs/loss.md",
    "docs/loss_study.md",
    "docs/optimizers.md",
    "docs/quantization.md",
    "docs/quickstart.md",
    "docs/rounding_errors.md",
    "docs/stability.md",
    "docs/telemetry.md",
    "docs/training.md",
    "docs/upstream.md",
)

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
    """Part of a sentence; `values` computes what its format fields must show."""

    pattern: str
    values: Callable[[], Sequence[Value]]


class Table(NamedTuple):
    """A table between `<!-- table: name -->` and `<!-- end of table -->`: a header, then rows."""

    name: str
    rows: Callable[[], list[list[str]]]


class Given(NamedTuple):
    """Words with figures that are not results, and why they stand there."""

    words: str
    reason: str


Figure = Sentence | Table | Given


class Page(NamedTuple):
    """A file, by its path in the repository, and the figures that it shows."""

    name: str
    figures: Sequence[Figure] = ()


class Correction(NamedTuple):
    """What must stand at a place of the text."""

    start: int
    stop: int
    text: str


class Found(NamedTuple):
    """What a declaration says of the text.

    Attributes:
        places: where the text has the figures that it declares, as start and stop.
        errors: what is wrong with them.
        corrections: that make them right.
    """

    places: Sequence[tuple[int, int]]
    errors: Sequence[str] = ()
    corrections: Sequence[Correction] = ()


def documents() -> list[str]:
    """The files whose figures are checked, as paths in the repository."""
    paths = (path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern)))
    names = (str(path.relative_to(ROOT)) for path in paths)
    return [name for name in names if name not in CONVERTED]


def compare(page: Page, text: str) -> tuple[str, list[str]]:
    """The corrected text of a page, and what was wrong with it."""
    found = [_find(figure, text) for figure in page.figures]
    places = [place for one in found for place in one.places]
    errors = [error for one in found for error in one.errors]
    errors += [f"no parent is declared of {words!r}" for words in _orphans(page, text, places)]
    for start, stop, new in sorted((c for one in found for c in one.corrections), reverse=True):
        text = text[:start] + new + text[stop:]
    return text, [f"{page.name}: {error}" for error in errors]


def _find(figure: Figure, text: str) -> Found:
    match figure:
        case Sentence():
            return _sentence(figure, text)
        case Table():
            return _table(figure, text)
        case Given():
            return _given(figure, text)


def _sentence(sentence: Sentence, text: str) -> Found:
    matches = list(_expression(sentence.pattern).finditer(text))
    if len(matches) != 1:
        return Found([], [f"{len(matches)} times instead of once: {sentence.pattern!r}"])
    (match,) = matches
    wrong = [
        (place, shown) for place, shown in enumerate(shown_by(sentence), 1) if match[place] != shown
    ]
    return Found(
        [match.span()],
        [f"{match[place]} should be {shown} in {sentence.pattern!r}" for place, shown in wrong],
        [Correction(*match.span(place), shown) for place, shown in wrong],
    )


def _table(table: Table, text: str) -> Found:
    block = re.search(rf"<!-- table: {table.name} -->\n(.*?)<!-- end of table -->", text, re.S)
    if block is None:
        return Found([], [f"no place for the table {table.name!r}"])
    expected = _markdown(table.rows())
    if block[1] == expected:
        return Found([block.span()])
    error = f"the table {table.name!r} differs from its results"
    return Found([block.span()], [error], [Correction(*block.span(1), expected)])


def _given(given: Given, text: str) -> Found:
    places = [m.span() for m in _expression(given.words, fields=False).finditer(text)]
    return Found(places, [] if places else [f"given, but not there: {given.words!r}"])


def shown_by(sentence: Sentence) -> list[str]:
    """What the format fields of a sentence must show."""
    formats = [field[1] or "" for field in FIELD.finditer(sentence.pattern)]
    values = sentence.values()
    return [f"{{{form}}}".format(value) for form, value in zip(formats, values, strict=True)]


def _orphans(page: Page, text: str, declared: list[tuple[int, int]]) -> Iterator[str]:
    for found in FIGURE.finditer(_prose(page, text)):
        inside = (start <= found.start() and found.end() <= stop for start, stop in declared)
        if not any(inside):
            line = text.count("\n", 0, found.start()) + 1
            yield f"line {line}: {' '.join(found[0].split())}"


def _prose(page: Page, text: str) -> str:
    """The text with everything that is no prose blanked: code, addresses, comments.

    Positions stay as they are. Of a Python file, only its docstring is prose.
    """
    if page.name.endswith(".py"):
        docstring = ast.get_docstring(ast.parse(text), clean=False) or ""
        start = text.index(docstring)
        text = " " * start + docstring
    return CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def _expression(pattern: str, *, fields: bool = True) -> re.Pattern[str]:
    """Words as a regular expression: any white space, and numbers in place of fields."""
    pieces = FIELD.sub("\0", pattern).split("\0") if fields else [pattern]
    escaped = (r"\s+".join(map(re.escape, re.split(r"\s+", piece))) for piece in pieces)
    return re.compile(f"({NUMBER})".join(escaped))


def _markdown(rows: list[list[str]]) -> str:
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)
