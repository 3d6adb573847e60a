"""The figures of docs/layers.md."""

from experiments.figures.compare import Given, Page, Sentence
from experiments.figures.measured import bounds
from experiments.figures.measured.layers import range_in_int8, unit
from experiments.figures.measured.package import CAPABILITY
from experiments.figures.pages.reasons import ARITHMETIC
from experiments.stacks import Sizes

PRESETS = {  # a row of the table of presets, and a preset measured that saves the same
    "BF16` | unchanged | unchanged | q, k, v, o": "BF16",
    "FP8_LINEAR` | FP8 | unchanged | q, k, v, o": "FP8_LINEAR",
    "COAT` | FP8 | FP8 in blocks of 16 | q, k, v, o": "COAT",
    "COAT_LEAN` | FP8 | FP8 in blocks of 16 | q, k, v, o in FP8": "COAT_LEAN",
    "COAT_INT8` | INT8 forward, FP8 backward | FP8 in blocks of 16 | q, k, v, o": "COAT",
    "COAT_PAPER` | FP8 | FP8 in blocks of 16 | q, k, v, o": "COAT",
}

PAGE = Page(
    "docs/layers.md",
    [
        *(
            Sentence(f"| `coat.{row} | {{:.1f}} U |", lambda name=name: (unit(name),))
            for row, name in PRESETS.items()
        ),
        Given(
            "1 U is the size of the layer's input, the residual stream, in BF16: 2 bytes",
            ARITHMETIC,
        ),
        Sentence(
            "whose hidden width is {:.2f} times the width",
            lambda: (Sizes().hidden / Sizes().width,),
        ),
        Given("saves only the input of each layer (1 U)", ARITHMETIC),
        Sentence("saves that input in FP8 ({:.2f} U)", lambda: ((1 + 1 / 16) / 2,)),
        Sentence("A layer takes [{:.1f} to {:.1f} % longer", range_in_int8),
        Sentence(
            "1000 times larger than the others, the error of its output in the other columns grows "
            "by {:.0f} %",
            lambda: bounds.extreme_norm()[2:],
        ),
        Given("as soon as it is 256 times larger than what is added", ARITHMETIC),
        Sentence("older than Ada (compute capability {:.1f})", lambda: (CAPABILITY,)),
    ],
)
