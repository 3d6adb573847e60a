"""The figures of docs/optimizers.md."""

import optax

from coat_jax.optax import fp8_adamw
from experiments.figures.compare import Given, Page, Sentence
from experiments.figures.measured.package import MOMENTS, bytes_of_state
from experiments.figures.measured.throughput import (
    LARGER_MODEL_ON_H200,
    larger_model_slower,
    slower,
)
from experiments.figures.pages.reasons import ARITHMETIC, PUBLISHED, SETTING
from experiments.published.compressed_optax import ratios


def percent_larger(shape: tuple[int, ...]) -> float:
    """By how many percent the state of `fp8_adamw` is larger than that of `optax.adamw`."""
    ours, theirs = (bytes_of_state(tx, shape) for tx in (fp8_adamw(1e-3), optax.adamw(1e-3)))
    return 100 * (ours / theirs - 1)


PAGE = Page(
    "docs/optimizers.md",
    [
        Sentence(
            "becomes {:.1f} to {:.1f} times as large. All others [stay within 6 %",
            lambda: [end(ratios("contrib.cocob", "contrib.madgrad")) for end in (min, max)],
        ),
        Sentence(
            "larger than that of `optax.adamw` by {:.1f} % for a leaf of shape (64, 64), {:.1f} % "
            "for (64, 8), {:.1f} % for (8, 8, 8), and {:.0f} % for (3,)",
            lambda: [percent_larger(shape) for shape in ((64, 64), (64, 8), (8, 8, 8), (3,))],
        ),
        Sentence(
            "stores the momentum as 8-bit integers, {:.2f} bytes per parameter",
            lambda: (MOMENTS / 2,),
        ),
        Given("learning rates are near 0.02", PUBLISHED),
        Given("With b1 of 0.95 and below", SETTING),
        Given("by up to 5 codes of 127 with b1 = 0.9", ARITHMETIC),
        Given("by 10 with the beta of `fp8_muon`, 0.95", ARITHMETIC),
        Given(
            "beside a gradient of 1e12 times their own, for 500 steps with b2 = 0.95, and for "
            "22,000 with b2 = 0.999",
            ARITHMETIC,  # (1 - b2) 1e24 b2^t = 2^36
        ),
        Sentence(
            "offloading makes a step of Llama-2-7B {:.1f} % longer if gradients are released, and "
            "{:.0f} % longer if not",
            lambda: (slower("offloaded", "released", than=("released",)), slower("offloaded")),
        ),
        Sentence(
            "its step is {:.1f} % longer with them in host memory",
            lambda: (larger_model_slower(LARGER_MODEL_ON_H200, 6),),
        ),
    ],
)
