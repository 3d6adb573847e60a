"""The figures of README.md."""

from experiments.figures.compare import Given, Page, Sentence, Table
from experiments.figures.measured import loss_study, throughput
from experiments.figures.measured.layers import longer_in_int8, unit
from experiments.figures.measured.package import CAPABILITY, MOMENTS
from experiments.figures.pages.loss import int8_forward
from experiments.figures.pages.reasons import SETTING

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
        Given("with 95 % intervals over seeds", SETTING),
        Table("readme_int8", lambda: [row[:6] for row in int8_forward()]),
        Sentence("8-bit moments alone cost {:+.2f} % ± {:.2f}", lambda: loss_study.cost("moments")),
        Sentence(
            "activations saved in FP8 alone {:+.2f} % ± {:.2f}", lambda: loss_study.cost("saved")
        ),
        Sentence(
            "8-bit momentum of `fp8_muon` costs [{:+.2f} % ± {:.2f}](docs/loss.md#muon)",
            lambda: loss_study.cost("fp8_muon", muon=True),
        ),
        Sentence("a layer takes {:.1f} % longer", longer_in_int8),
        Sentence("compute capability {:.1f} or newer", lambda: (CAPABILITY,)),
    ],
)
