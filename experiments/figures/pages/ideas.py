"""The figures of docs/ideas.md."""

from typing import Any

from experiments.figures.compare import Given, Page, Sentence
from experiments.figures.measured.files import of
from experiments.figures.measured.package import MOMENTS
from experiments.figures.pages.reasons import ARITHMETIC, SETTING


def group() -> dict[str, Any]:
    """The group of moments that the page shows."""
    return of("ideas")["group"]


PAGE = Page(
    "docs/ideas.md",
    [
        Given("moments take 8 bytes a parameter in FP32", ARITHMETIC),
        Sentence("The group spans {:.1f} binades.", lambda: (group()["binades"],)),
        Sentence(
            "With k = {:.2f} the group fills the whole format, and a binade of the group has "
            "{:.2f} times",
            lambda: (group()["k"], group()["k"]),
        ),
        Given("in 5 bytes a group", ARITHMETIC),
        Sentence(
            "in equal ratios: {:.0f} to a binade in this group",
            lambda: (group()["codes a binade of a logarithm"],),
        ),
        Sentence(
            "is off by {:.1f} % with one scale, by {:.1f} % with dynamic range expansion and by "
            "{:.1f} %",
            lambda: [100 * error for error in group()["errors of m / sqrt(v)"].values()],
        ),
        Sentence("Both moments together take {:.2f} bytes a parameter", lambda: (MOMENTS,)),
        Given("With b2 = 0.999", SETTING),
        Given("1 U is the size of the layer's input in BF16, 2 bytes x", ARITHMETIC),
    ],
)
