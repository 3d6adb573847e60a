"""The figures of docs/optimizers.md."""

import optax

from coat_jax.optax import fp8_adamw
from experiments.figures.compare import Given, Page, Sentence
from experiments.figures.measured.package import MOMENTS, bytes_of_placeholders, bytes_of_state
from experiments.figures.measured.throughput import slower
from experiments.figures.pages.compressed_optax import WORSE, largest_change, times_the_loss
from experiments.figures.pages.reasons import ARITHMETIC, PUBLISHED, SETTING


def states_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The bytes of placeholders, and of the states of `fp8_adamw` and `optax.adamw`."""
    ours, theirs = (bytes_of_state(tx, shape) for tx in (fp8_adamw(1e-3), optax.adamw(1e-3)))
    return ours - theirs, ours, theirs


PAGE = Page(
    "docs/optimizers.md",
    [
        Sentence(
            "becomes {:.1f} to {:.1f} times as large. All others [stay within {:.0f} %",
            lambda: (*times_the_loss(*WORSE), largest_change()),
        ),
        Sentence(
            "{:.0f} bytes for a parameter of shape (3,), where the whole state takes {:.0f} bytes "
            "and that of `optax.adamw` {:.0f}",
            lambda: states_of((3,)),
        ),
        Sentence(
            "{:.0f} bytes for (64, 64), and {:.0f} bytes for (8, 8, 8)",
            lambda: (bytes_of_placeholders((64, 64)), bytes_of_placeholders((8, 8, 8))),
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
