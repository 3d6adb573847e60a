"""What INT8 and FP8 cost a trained network, and whether training in FP8 lowers this cost.

    python -m experiments.after_training --size 40M --seeds 0 1 2 --out DIR
    python -m experiments.after_training --plan --size 124M --seeds 0 1 2
    python -m experiments.after_training --merge FILE...    adds results to the committed file
    python -m experiments.after_training                    the tables of what is there

Networks are arms of `loss_study`: trained in BF16, with FP8 products, and in COAT, from several
seeds, on the same batches. Each is then quantized by every recipe of `recipes`, without training
and after a few steps that anticipate the format. The result is the held-out loss above that of the
same parameters in BF16, by seed, and whether it differs between ways of training.

A run that has a row is not made again; one that was stopped continues if --work is still there.
`--size tiny --arms bf16 --text 5` runs on any CPU.
"""

from experiments.after_training.study import STUDY
from experiments.study import command


def main() -> None:
    """Measures what quantization costs, and shows it."""
    command.main(STUDY, __doc__)


if __name__ == "__main__":
    main()
