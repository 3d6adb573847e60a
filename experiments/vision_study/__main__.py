"""What FP8 costs a model that sees, by the parts that are in FP8.

    python -m experiments.vision_study --list              what there is
    python -m experiments.vision_study --size 40M --seeds 0 1 2 --out DIR
    python -m experiments.vision_study --merge FILE...     adds results to the committed file
    python -m experiments.vision_study                     the tables of what is there
    python -m experiments.vision_study --size tiny --steps 4 --arms bf16 coat --out DIR

The last one is a test for any CPU. Pictures are grids of nine coloured icons of the font Phosphor
(pip install --no-deps qtawesome), and come with questions. All arms of a seed start from the same
parameters and see the same pictures; baselines differ by rounding only. Losses are in nats per
token of an answer. Exact answers of two arms are compared by McNemar's test, over the same
questions.
"""

from experiments.study import command
from experiments.vision_study.study import STUDY


def main() -> None:
    """Measures what FP8 costs, and shows it."""
    command.main(STUDY, __doc__)


if __name__ == "__main__":
    main()
