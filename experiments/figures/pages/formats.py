"""The figures of docs/formats.md."""

from experiments.figures.compare import Given, Page, Sentence, Table
from experiments.figures.measured import after_training
from experiments.figures.measured.files import bold, of
from experiments.figures.pages.reasons import PUBLISHED, SETTING

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


PER_TOKEN = {form: f"{form} mse dynamic" for form in after_training.FORMATS}
SIZES = (after_training.MODEL, after_training.LARGER)
ONE_SCALE = [f"int8 {fit} static" for fit in ("mse", "max", "percentile")]


PAGE = Page(
    "docs/formats.md",
    [
        Table("after_training", after_training.by_recipe),
        Given("networks of 40 million parameters", SETTING),
        Given("from 3 seeds each", SETTING),
        Given("A trained network of 40 million parameters", SETTING),
        Sentence(
            "where each token has a scale, {:+.3f} % ± {:.3f} instead of {:+.3f} % ± {:.3f}",
            lambda: (
                *after_training.cost(PER_TOKEN["int8"]),
                *after_training.cost(PER_TOKEN["fp8"]),
            ),
        ),
        Sentence(
            "training in BF16 by {:+.3f} % ± {:.3f} in the same seeds, and the cost of FP8 by "
            "{:+.3f} % ± {:.3f}. Networks with FP8 products alone do not differ either (Holm p of "
            "all differences: {:.2f})",
            lambda: (
                *after_training.excess(PER_TOKEN["int8"]),
                *after_training.excess(PER_TOKEN["fp8"]),
                after_training.least_p(),
            ),
        ),
        Sentence(
            "INT8 costs {:+.3f} % with the range of the least error, {:+.3f} % up to the largest "
            "magnitude, and {:+.3f} % if one number in a thousand is clipped",
            lambda: tuple(after_training.cost(recipe)[0] for recipe in ONE_SCALE),
        ),
        Given("124 million parameters, also trained from 3 seeds", SETTING),
        Sentence(
            "loses {:+.3f} % ± {:.3f} in INT8 and {:+.3f} % ± {:.3f} in FP8 after training in "
            "BF16. After training in COAT its cost differs by {:+.3f} % ± {:.3f} and {:+.3f} % ± "
            "{:.3f} in the same seeds, and after training with FP8 products alone by {:+.3f} % ± "
            "{:.3f} and {:+.3f} % ± {:.3f} (the lowest Holm p of all differences: {:.2f}). With "
            "one scale up to the largest magnitude INT8 costs {:+.3f} % ± {:.3f}",
            lambda: (
                *after_training.cost(PER_TOKEN["int8"], size=after_training.LARGER),
                *after_training.cost(PER_TOKEN["fp8"], size=after_training.LARGER),
                *after_training.excess(PER_TOKEN["int8"], size=after_training.LARGER),
                *after_training.excess(PER_TOKEN["fp8"], size=after_training.LARGER),
                *after_training.excess(PER_TOKEN["int8"], "products", after_training.LARGER),
                *after_training.excess(PER_TOKEN["fp8"], "products", after_training.LARGER),
                after_training.least_p(after_training.LARGER),
                *after_training.cost("int8 max static", size=after_training.LARGER),
            ),
        ),
        Sentence(
            "the network in INT8 loses {:+.3f} % ± {:.3f} (40 million parameters) and {:+.3f} % ± "
            "{:.3f} (124 million); after as many in BF16 it loses {:+.3f} % ± {:.3f} and "
            "{:+.3f} % ± {:.3f}. In FP8 it loses {:+.3f} % ± {:.3f} and {:+.3f} % ± {:.3f} after "
            "steps that round to FP8, and {:+.3f} % ± {:.3f} and {:+.3f} % ± {:.3f} after steps in "
            "BF16.",
            lambda: tuple(
                value
                for form in after_training.FORMATS
                for further in (form, "bf16")
                for size in SIZES
                for value in after_training.cost(PER_TOKEN[form], further=further, size=size)
            ),
        ),
        Sentence(
            "these networks are also worse: by {:+.3f} % ± {:.3f} and {:+.3f} % ± {:.3f} after "
            "steps that round to INT8",
            lambda: tuple(
                value
                for size in SIZES
                for value in after_training.cost("bf16", further="int8", size=size)
            ),
        ),
        Table("after_further_training", after_training.by_further_training),
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
            "loses {:.1f} bits against the best range with normal data, and {:.1f} with Laplace "
            "data",
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
