"""What weights and caches in INT4 cost a trained network.

    python -m experiments.int4_study --size 40M --seeds 0 1 2 --out DIR
    python -m experiments.int4_study --plan --size 124M --seeds 0 1 2
    python -m experiments.int4_study --merge FILE...    adds results to the committed file
    python -m experiments.int4_study                    the tables of what is there

Networks are arms of `loss_study`: trained in BF16 and in COAT, from several seeds, on the same
batches. Each is then quantized in every way of `ways`, without training. The result is the
increase of the held-out loss in nats, how it compares with FireQ's, and whether it depends on the
training.

A run that has a row is not made again; one that was stopped continues if --work is still there.
`--size tiny --arms bf16 --text 5` runs on any CPU.
"""

from experiments.int4_study.study import STUDY
from experiments.study import command


def main() -> None:
    """Measures what INT4 costs, and shows it."""
    command.main(STUDY, __doc__)


if __name__ == "__main__":
    main()
