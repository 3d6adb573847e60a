"""The figures of docs/optimizers.md."""

from experiments.figures.compare import Given, Page, Sentence, Table
from experiments.figures.measured.files import of
from experiments.figures.measured.package import MOMENTS
from experiments.figures.measured.throughput import slower
from experiments.figures.pages.reasons import PUBLISHED


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


PAGE = Page(
    "docs/optimizers.md",
    [
        Sentence(
            "stores that momentum as 8-bit integers, {:.2f} bytes per parameter",
            lambda: (MOMENTS / 2,),
        ),
        Given("learning rates are near 0.02", PUBLISHED),
        Sentence(
            "On one H200 a step of Llama-2-7B takes {:.1f} % longer this way, with gradients "
            "released, and {:.0f} % longer without",
            lambda: (slower("offloaded", "released"), slower("offloaded")),
        ),
        Table("compress_table", compress_table),
    ],
)
