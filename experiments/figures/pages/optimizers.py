"""The figures of docs/optimizers.md."""

import math

import optax

from coat_jax.optax import fp8_adamw
from experiments.figures.compare import Given, Page, Sentence
from experiments.figures.measured.package import MOMENTS, bytes_of_placeholders, bytes_of_state
from experiments.figures.measured.throughput import (
    LARGER_MODEL_ON_H200,
    larger_model_slower,
    slower,
)
from experiments.figures.pages.compressed_optax import WORSE, largest_change, times_the_loss
from experiments.figures.pages.reasons import ARITHMETIC, PUBLISHED, SETTING

NARROW = (8, 8, 1)  # a shape whose placeholders are largest beside its moments


def states_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The bytes of placeholders, and of the states of `fp8_adamw` and `optax.adamw`."""
    ours, theirs = (bytes_of_state(tx, shape) for tx in (fp8_adamw(1e-3), optax.adamw(1e-3)))
    return ours - theirs, ours, theirs


def percent_larger(shape: tuple[int, ...]) -> float:
    """By how many percent the state of `fp8_adamw` is larger than that of `optax.adamw`."""
    placeholders, _, theirs = states_of(shape)
    return 100 * placeholders / theirs


def at_worst() -> tuple[float, int, int]:
    """Placeholders over moments, and the bytes of both; tests/test_storage.py has the bound."""
    placeholders, moments = bytes_of_placeholders(NARROW), 8 * math.prod(NARROW)
    return placeholders / moments, placeholders, moments


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
            "larger than that of `optax.adamw` by {:.1f} % for (64, 64), {:.1f} % for (64, 8), "
            "{:.1f} % for (8, 8, 8), and {:.0f} % for (3,)",
            lambda: [percent_larger(shape) for shape in ((64, 64), (64, 8), (8, 8, 8), (3,))],
        ),
        Sentence(
            "the placeholders take {:.2f} times as many bytes as the moments beside them, as for "
            "(8, 8, 1): {} bytes beside {}.",
            at_worst,
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
            lambda: (slower("offloaded", "released", than=("released",)), slower("offloaded")),
        ),
        Sentence(
            "its step is {:.1f} % longer with them in host memory",
            lambda: (larger_model_slower(LARGER_MODEL_ON_H200, 6),),
        ),
    ],
)
