"""What each part of FP8 training costs in loss, and how much of that is noise.

    python -m experiments.loss_study --list                what there is
    python -m experiments.loss_study --plan --size 40M     what would run, and for how long
    python -m experiments.loss_study --size 40M --seeds 0 1 2 --arms bf16 bf16_ulp coat --out DIR
    python -m experiments.loss_study --merge FILE...       adds results to the committed file
    python -m experiments.loss_study                       the tables of what is there
    python -m experiments.loss_study --size tiny --steps 4 --arms bf16 coat --text 5 --out DIR

The last one is a test for any CPU. An arm is one change to BF16 training with FP32 moments; it is
trained from several seeds, side by side with the others, on the same batches. Baselines differ from
each other by rounding only and show how large a difference means nothing. A run that has a row in
the results is not measured again; one that was stopped continues if --work is still there.

The text is what is on the machine, each document once, and no run reads any of it twice.
"""

from experiments.loss_study.study import STUDY
from experiments.study import command


def main() -> None:
    """Measures what parts of FP8 training cost, and shows it."""
    command.main(STUDY, __doc__)


if __name__ == "__main__":
    main()
