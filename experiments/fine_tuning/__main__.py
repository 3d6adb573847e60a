"""What FP8 costs a network that is tuned on other text than it was trained on.

    python -m experiments.fine_tuning --size 40M --steps 1200 --batch 32 --seeds 0 1 2 --out DIR
    python -m experiments.fine_tuning --plan --size 40M --steps 1200 --batch 32 --ways bf16 coat
    python -m experiments.fine_tuning --merge FILE...    adds results to the committed file
    python -m experiments.fine_tuning                    the table of what is there

A network is trained in BF16 as in `loss_study`, on source code and prose. It is then tuned on prose
that it has not read, at a tenth of the learning rate, in BF16 and in FP8 (`--ways`): all
parameters, which are in BF16 and rounded stochastically. All ways start from the same parameters
and read the same batches. What is measured is the loss above that of tuning in BF16.

A run that has a row is not made again; one that was stopped continues if --work is still there.
`--size tiny --steps 20 --text 20` runs on any CPU.
"""

from experiments.fine_tuning.study import STUDY
from experiments.study import command


def main() -> None:
    """Measures what tuning in FP8 costs, and shows it."""
    command.main(STUDY, __doc__)


if __name__ == "__main__":
    main()
