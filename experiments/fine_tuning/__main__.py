"""What FP8 costs a network that is tuned on other text than it was trained on.

    python -m experiments.fine_tuning --size 40M --steps 1200 --batch 32 --seeds 0 1 2 --out DIR
    python -m experiments.fine_tuning --size 40M --steps 1200 --batch 32 --seeds 3 4 5 --parts
    python -m experiments.fine_tuning --size 40M --steps 1200 --batch 32 --seeds 0 1 2 --int8
    python -m experiments.fine_tuning --plan --size 124M --seeds 0 1 2
    python -m experiments.fine_tuning --merge FILE...    adds results to the committed file
    python -m experiments.fine_tuning                    the table and picture of what is there

A network is trained in BF16 as in `loss_study`, on source code and prose. It is then tuned on prose
that it has not read, at a tenth of the learning rate, in BF16 and in FP8 (`ways`): all parameters,
which are in BF16 and rounded stochastically. All ways start from the same parameters and read the
same batches. What is measured is the loss above that of tuning in BF16.

With --parts, single operands of the products are rounded instead: which of them costs what, and in
which layers. With --int8, COAT is compared with COAT_INT8.

A run that has a row is not made again; one that was stopped continues if --work is still there.
"""

from types import ModuleType

from experiments.command import bare_parser_of
from experiments.fine_tuning import int8, parts, run
from experiments.fine_tuning.show import FILE, show
from experiments.loss_study.command import add_arguments, carry_out


def main() -> None:
    """Plans, measures, merges, or shows what was measured."""
    parser = bare_parser_of(__doc__)
    add_arguments(parser, arms=["bf16"], work="fine_tuning")
    parser.add_argument("--parts", action="store_true", help="tune with single operands rounded")
    parser.add_argument("--int8", action="store_true", help="tune with INT8 forward products")
    options = parser.parse_args()
    if options.parts and options.int8:
        parser.error("--parts and --int8 are two studies: choose one.")
    kind: ModuleType = parts if options.parts else int8 if options.int8 else run
    carry_out(options, FILE, show, module=kind.__name__, row_of=kind.row_of, cost_of=kind.cost_of)


if __name__ == "__main__":
    main()
