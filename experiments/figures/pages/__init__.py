"""The figures of each page: a module for each page that has many, in the page's order."""

from experiments.figures.compare import Page, documents
from experiments.figures.pages import (
    benchmarks,
    ideas,
    layers,
)

DECLARED = [
    benchmarks.PAGE,
    ideas.PAGE,
    layers.PAGE,
]


def all_pages() -> list[Page]:
    """Every page, also those that declare no figure."""
    declared = {page.name: page for page in DECLARED}
    return [declared.get(name, Page(name)) for name in documents()]
