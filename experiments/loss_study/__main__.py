"""What each part of FP8 training costs in loss, and how much of that is noise.

    python -m experiments.loss_study --size 40M --seeds 0 1 2 --arms bf16 bf16_ulp coat --out DIR
    python -m experiments.loss_study --plan ...            what would run, and for how long
    python -m experiments.loss_study --list-arms           what there is
    python -m experiments.loss_study --merge FILE...       adds results to the committed file
    python -m experiments.loss_study                       the table and picture of what is there

An arm is one change to BF16 training with FP32 moments; it is trained from several seeds, side by
side with the others, on the same batches. Baselines differ from each other by rounding only and
show how large a difference means nothing. A run that has a row in the results is not measured
again.

The text is what is on the machine, each document once, and no run reads any of it twice.
"""

from experiments.command import bare_parser_of
from experiments.loss_study import results
from experiments.loss_study.arm import differences
from experiments.loss_study.arms import ARMS
from experiments.loss_study.command import add_arguments, carry_out
from experiments.loss_study.table import show


def main() -> None:
    """Plans, measures, merges, or shows what was measured."""
    parser = bare_parser_of(__doc__)
    parser.add_argument("--list-arms", action="store_true", help="print the arms")
    add_arguments(parser, arms=["bf16", "bf16_ulp", "coat"], work="loss_study")
    options = parser.parse_args()
    if options.list_arms:
        width = max(map(len, ARMS)) + 2
        for name, arm in ARMS.items():
            print(f"{name:{width}}{'baseline; ' if arm.baseline else ''}{differences(arm)}")
    else:
        carry_out(options, results.FILE, show)


if __name__ == "__main__":
    main()
