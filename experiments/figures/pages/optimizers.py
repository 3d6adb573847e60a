"""The figures of docs/optimizers.md."""

from experiments.figures.compare import Given, Page, Sentence
from experiments.figures.measured.package import MOMENTS
from experiments.figures.measured.throughput import slower
from experiments.figures.pages.compressed_optax import WORSE, largest_change, times_the_loss
from experiments.figures.pages.reasons import ARITHMETIC, PUBLISHED, SETTING

PAGE = Page(
    "docs/optimizers.md",
    [
        Sentence(
            "becomes {:.1f} to {:.1f} times as large. All others [stay within {:.0f} %",
            lambda: (*times_the_loss(*WORSE), largest_change()),
        ),
        Sentence(
            "stores the momentum as 8-bit integers, {:.2f} bytes per parameter",
            lambda: (MOMENTS / 2,),
        ),
        Given("learning rates are near 0.02", PUBLISHED),
        Given("With b1 of 0.95 and below", SETTING),
        Given("by up to 5 codes of 127 with b1 = 0.9", ARITHMETIC),
        Given("by 10 with the beta of `fp8_muon`, 0.95", ARITHMETIC),
        Sentence(
            "offloading makes a step of Llama-2-7B {:.1f} % longer if gradients are released, and "
            "{:.0f} % longer if not",
            lambda: (slower("offloaded", "released"), slower("offloaded")),
        ),
    ],
)
