"""The figures of docs/formats.md."""

from experiments.figures.compare import Given, Page, Sentence, Table
from experiments.figures.measured.files import bold, of
from experiments.figures.pages.reasons import PUBLISHED

FORMATS = ["INT8", "E2M5", "E3M4", "E4M3", "E5M2"]
OUTLIERS = "normal, 0.1 % a hundred times larger"
HEAVY = "Student t, 4 degrees"


def bits(numbers: str, fmt: str, which: str = "theory") -> float:
    """The bits that a format gets right of numbers of this distribution."""
    return of("format_sqnr")["bits"][numbers][fmt][which]


def of_all(fmt: str) -> list[float]:
    """The same for every distribution."""
    return [bits(numbers, fmt) for numbers in of("format_sqnr")["bits"]]


def lost_at_the_maximum(numbers: str) -> float:
    """The bits of INT8 that the range up to the maximum of a tensor costs."""
    return bits(numbers, "INT8", "tensor") - bits(numbers, "INT8", "tensor at its maximum")


def format_sqnr() -> list[list[str]]:
    """The bits that are right in each format, by theory; the best of a row bold."""
    rows = [["numbers", *FORMATS]]
    for name in of("format_sqnr")["bits"]:
        found = [bits(name, fmt) for fmt in FORMATS]
        rows.append([name, *(bold(f"{b:.2f}", b == max(found)) for b in found)])
    return rows


PAGE = Page(
    "docs/formats.md",
    [
        Table("format_sqnr", format_sqnr),
        Sentence(
            "INT8 comes second, {:.1f} bits behind, and E3M4 third",
            lambda: (bits("normal", "E2M5") - bits("normal", "INT8"),),
        ),
        Sentence(
            "E4M3 gets {:.1f} to {:.1f} bits right, whatever the data",
            lambda: (min(of_all("E4M3")), max(of_all("E4M3"))),
        ),
        Sentence(
            "INT8 ranges from {:.1f} bits down to {:.1f} if one number in a thousand is a "
            "hundred times larger",
            lambda: (bits("uniform", "INT8"), bits(OUTLIERS, "INT8")),
        ),
        Sentence(
            "loses {:.1f} bits against the best range, with Laplace data {:.1f}",
            lambda: (lost_at_the_maximum("normal"), lost_at_the_maximum("Laplace")),
        ),
        Given("arXiv 2303.17951", PUBLISHED),
        Sentence(
            "to {:.2f} bits.",
            lambda: (of("format_sqnr")["largest deviation from the paper"],),
        ),
        Sentence(
            "on {:,} weighted random numbers theory and measurement differ by at most {:.2f} %",
            lambda: (
                of("format_sqnr")["weighted samples"],
                100 * of("format_sqnr")["largest deviation"],
            ),
        ),
        Sentence(
            "Student's t with 4 degrees, INT8 gets {:.1f} bits right instead of {:.1f}",
            lambda: (bits(HEAVY, "INT8", "tensor"), bits(HEAVY, "INT8")),
        ),
    ],
)
