"""The figures of README.md."""

from experiments.figures.compare import Page, Sentence, Table
from experiments.figures.measured import loss_study, throughput
from experiments.figures.measured.layers import longer_in_int8, unit
from experiments.figures.measured.package import CAPABILITY, MOMENTS
from experiments.figures.pages.loss import int8_forward

PAGE = Page(
    "README.md",
    [
        Sentence(
            "AdamW's two moments take {:.2f} bytes a parameter instead of {:.0f}.",
            lambda: (MOMENTS, 8),
        ),
        Sentence(
            "A Llama layer saves {:.1f} U for its backward pass, where BF16 saves {:.1f}.",
            lambda: (unit("COAT"), unit("BF16")),
        ),
        Sentence(
            "COAT trains {:.2f} times as fast as BF16 with FP32 moments, in {:.2f} times less "
            "memory",
            throughput.seven_billion,
        ),
        Table("training_throughput", throughput.plain_rows),
        Sentence(
            "A Llama of 40 million parameters, trained on {:.1f} million tokens from several seeds",
            lambda: (loss_study.million_tokens(*loss_study.STUDY),),
        ),
        Sentence(
            "8-bit moments alone: {:+.2f} % ± {:.2f} (95 % interval)",
            lambda: loss_study.cost("moments"),
        ),
        Sentence(
            "activations saved in FP8 alone: {:+.2f} % ± {:.2f}",
            lambda: loss_study.cost("saved"),
        ),
        Sentence(
            "COAT, which adds FP8 products: {:+.2f} % ± {:.2f} over eight seeds; COAT_LEAN, over "
            "seven: {:+.2f} % ± {:.2f}",
            lambda: (*loss_study.cost("coat"), *loss_study.cost("coat_lean")),
        ),
        Sentence(
            "of the run in BF16 (`--bf16_steps 0.25`): {:+.2f} % ± {:.2f} over eight seeds",
            lambda: loss_study.cost("coat_after_bf16"),
        ),
        Sentence(
            "After [{:.1f} million tokens](docs/loss.md#longer-runs)",
            lambda: (loss_study.million_tokens(*loss_study.LONGER),),
        ),
        Sentence(
            "COAT ends {:+.2f} % ± {:.2f} above BF16, over three seeds; the held-out loss of the "
            "same weights, evaluated in BF16, is {:+.2f} % ± {:.2f} above it",
            loss_study.cost_of_longer_runs,
        ),
        Sentence("costs less, and a layer takes {:.1f} % longer", longer_in_int8),
        Table("readme_int8", lambda: [row[:5] for row in int8_forward()]),
        Sentence(
            "A model of 124 million parameters ends {:+.2f} % ± {:.2f} above BF16",
            lambda: loss_study.larger("coat"),
        ),
        Sentence(
            "there rounding alone may set two BF16 runs {:.2f} % apart",
            loss_study.larger_apart,
        ),
        Sentence(
            "Two BF16 runs that differ only in rounding end {:.3f} % apart",
            lambda: (loss_study.floor(),),
        ),
        Sentence("compute capability {:.1f} or newer", lambda: (CAPABILITY,)),
    ],
)
