"""The figures of docs/architecture.md."""

from coat_jax.numerics.expansion import GROUP_SIZE
from experiments.figures.compare import Given, Page, Sentence
from experiments.figures.measured import bounds, loss_study
from experiments.figures.measured.layers import exact_scale_gains, exact_scales_in_our_bytes
from experiments.figures.measured.package import CAPABILITY, MOMENTS
from experiments.figures.pages.reasons import ARITHMETIC, SETTING

PAGE = Page(
    "docs/architecture.md",
    [
        Sentence(
            "Two moments take 2 (1 + 5/{:.0f}) = {:.2f} bytes a parameter",
            lambda: (GROUP_SIZE, MOMENTS),
        ),
        Given("At b2 = 0.999 a step", SETTING),
        Given("b1 above 0.95", SETTING),
        Given("b1 above 0.916", ARITHMETIC),
        Given("7.3 learning rates for b1 = 0.9 and b2 = 0.999, 1.2 for b2 = 0.95", ARITHMETIC),
        Given("under 16,384 elements", SETTING),
        Sentence(
            "It moves {:.1f} bytes per FP32 parameter with BF16 gradients, where AdamW with FP32 "
            "moments moves {:.0f}.",
            lambda: (4 + 4 + 2 + 2 * MOMENTS, 4 + 4 + 2 + 2 * 8),
        ),
        Sentence(
            "one byte per 16 values: {:.2f} bytes a value. An exact scale takes {:.3f} bytes with "
            "BF16 and {:.2f} with FP32.",
            lambda: [1 + scale / 16 for scale in (1, 2, 4)],
        ),
        Sentence(
            "makes the error of a norm's input {:.0f} % smaller and that of the recomputed "
            "activation {:.0f} %",
            lambda: (exact_scale_gains("x"), exact_scale_gains("a")),
        ),
        Sentence(
            "are up to {:.0f} times too large in a trained model",
            lambda: bounds.looseness_of_gradients()[:1],
        ),
        Sentence(
            "take the same bytes and make these errors {:.0f} % and {:.0f} % smaller.",
            lambda: exact_scales_in_our_bytes()[1:],
        ),
        Sentence(
            "cost in loss](loss.md#the-cost-of-each-part) is {:.2f} % ± {:.2f}.",
            lambda: loss_study.above("muon_products", "muon_coat"),
        ),
        Sentence("compute capability {:.1f} or newer", lambda: (CAPABILITY,)),
        Given("since JAX 0.11", SETTING),
    ],
)
