"""The figures of docs/benchmarks.md: a module for each subject."""

from experiments.figures.compare import Page
from experiments.figures.pages.benchmarks import layers, origin, steps, training

PAGE = Page(
    "docs/benchmarks.md",
    [
        *training.FIGURES,
        *layers.FIGURES,
        *steps.FIGURES,
        *origin.FIGURES,
    ],
)
