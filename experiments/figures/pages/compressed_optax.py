"""The figures of docs/compressed_optax.md."""

import math

from experiments.figures.compare import Page, Sentence, Table
from experiments.figures.measured.files import of

DTYPES = ("float32", "bfloat16")
WORSE = ("contrib.cocob", "contrib.madgrad")


def ratios(name: str) -> list[float]:
    """The loss with compress over that without, for each dtype in which it does not diverge."""
    losses = (of("compress_table")["trained"][name][dtype] for dtype in DTYPES)
    return [one["compressed_loss"] / one["loss"] for one in losses if one["loss"] is not None]


def times_the_loss(*names: str) -> tuple[float, float]:
    """The smallest and the largest of these ratios."""
    found = [ratio for name in names for ratio in ratios(name)]
    return min(found), max(found)


def largest_change() -> int:
    """By how many percent, rounded up, any other loss changes at most."""
    others = (name for name in of("compress_table")["trained"] if name not in WORSE)
    return math.ceil(max(100 * abs(ratio - 1) for name in others for ratio in ratios(name)))


def compress_table() -> list[list[str]]:
    """Losses of every transformation, as it is and compressed."""
    rows = [
        ["transformation", "leaves in FP8", "loss, FP32", "compressed", "loss, BF16", "compressed"]
    ]
    for name, row in of("compress_table")["trained"].items():
        losses = [
            row[dtype][which]
            for dtype in ("float32", "bfloat16")
            for which in ("loss", "compressed_loss")
        ]
        shown = ["diverges" if loss is None else f"{loss:.3g}" for loss in losses]
        rows.append([name, str(row["compressed_leaves"]), *shown])
    return rows


def refused_table() -> list[list[str]]:
    """What compress does not take, with the reason: its own words, and what is excluded."""
    measured = of("compress_table")
    reasons = measured["refused"] | measured["excluded"]
    return [["transformation", "why"], *([name, why] for name, why in reasons.items())]


def unchanged() -> int:
    """For how many transformations without moments compress changes no update."""
    return sum(of("compress_table")["stateless"].values())


PAGE = Page(
    "docs/compressed_optax.md",
    [
        Sentence(
            "the loss of `cocob` {:.1f} to {:.1f} times and that of `madgrad` {:.1f} to {:.1f} "
            "times as large",
            lambda: (*times_the_loss(WORSE[0]), *times_the_loss(WORSE[1])),
        ),
        Sentence("All others end within {:.0f} % of their loss", lambda: (largest_change(),)),
        Table("compress_table", compress_table),
        Table("compress_refused", refused_table),
        Sentence("accepts the {} `scale_by_*` that", lambda: (len(of("compress_table")["links"]),)),
        Sentence("{} transformations without moments, such as", lambda: (unchanged(),)),
    ],
)
