"""What INT8 and FP8 cost a trained network, and whether training in FP8 lowers this cost.

    python -m experiments.after_training --size 40M --seeds 0 1 2 --out DIR
    python -m experiments.after_training --plan --size 124M --seeds 0 1 2
    python -m experiments.after_training --merge FILE...    adds results to the committed file
    python -m experiments.after_training                    the tables and pictures of what is there

Networks are arms of `loss_study`: trained in BF16, with FP8 products, and in COAT, from several
seeds, on the same batches. Each is then quantized by every recipe of `recipes`, without training
and after a few steps that anticipate the format. The result is the held-out loss above that of the
same parameters in BF16, by seed, and whether it differs between ways of training.

A run that has a row is not made again; one that was stopped continues if --work is still there.
"""

from experiments.after_training.run import cost_of, row_of
from experiments.after_training.show import FILE, show
from experiments.command import bare_parser_of
from experiments.loss_study.command import add_arguments, carry_out

MODULE = "experiments.after_training.run"
COMPILING = 150.0  # seconds of a run: a program for each recipe, and three that train


def main() -> None:
    """Plans, measures, merges, or shows what was measured."""
    parser = bare_parser_of(__doc__)
    add_arguments(parser, arms=["bf16", "products", "coat"], work="after_training")
    carry_out(
        parser.parse_args(),
        FILE,
        show,
        module=MODULE,
        row_of=row_of,
        cost_of=cost_of,
        compiling=COMPILING,
    )


if __name__ == "__main__":
    main()
