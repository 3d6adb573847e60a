"""The figures of README.md."""

from experiments.figures.compare import Given, Page, Sentence, Table
from experiments.figures.measured import loss_study, throughput
from experiments.figures.measured.layers import range_in_int8, unit
from experiments.figures.measured.loss_study import STANDARD
from experiments.figures.measured.package import CAPABILITY, MOMENTS
from experiments.figures.pages.reasons import SETTING
from experiments.figures.pages.stability import chance, difference, in_points

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
        Given("of 40 million parameters", SETTING),
        Sentence("AdamW, the difference is {:+.2f} % ± {:.2f},", lambda: loss_study.cost("coat")),
        Sentence(
            "or {:+.2f} % ± {:.2f} in `COAT_INT8`, which", lambda: loss_study.cost("coat_int8")
        ),
        Given("(95 % intervals over", SETTING),
        Sentence("intervals over {:.0f} seeds)", lambda: (loss_study.seeds("coat_int8"),)),
        Sentence("differ only in rounding end {:.3f} % apart", lambda: (loss_study.floor(),)),
        Given("124 million parameters", SETTING),
        Sentence(
            "{:.1f} million tokens, with Muon, whose states are in FP32 in both, the difference is "
            "{:+.2f} % ± {:.2f}, or {:+.2f} % ± {:.2f} in `COAT_INT8`, over {:.0f} seeds",
            lambda: (
                loss_study.million_tokens(*STANDARD, muon=True),
                *loss_study.with_muon(*STANDARD),
            ),
        ),
        Sentence(
            "8-bit moments alone cost {:+.2f} % ± {:.2f} over {:.0f} seeds, and activations saved "
            "in FP8 alone {:+.2f} % ± {:.2f} over {:.0f}.",
            lambda: (
                number
                for arm in ("moments", "saved")
                for number in (*loss_study.cost(arm), loss_study.seeds(arm))
            ),
        ),
        Given("a model of 5 million parameters", SETTING),
        Sentence("a layer takes {:.1f} to {:.1f} % longer", range_in_int8),
        Sentence(
            "{:.1f} percentage points more runs failed in COAT than in BF16, with a 95 % interval "
            "from {:+.1f} to {:+.1f}",
            lambda: in_points(chance(difference("coat"))),
        ),
        Sentence("compute capability {:.1f} or newer", lambda: (CAPABILITY,)),
    ],
)
