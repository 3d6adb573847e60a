"""What FP8 and sparse attention cost a model of videos, apart and together.

    python -m experiments.video_study --list              what there is
    python -m experiments.video_study --size 35M --seeds 0 1 2 --out DIR
    python -m experiments.video_study --merge FILE...     adds results to the committed file
    python -m experiments.video_study --draw              the tables, and pictures
    python -m experiments.video_study --size tiny --steps 4 --arms bf16 both --out DIR

The last one is a test for any CPU. Videos show two shapes of some colors that move, which a text
names. All arms of a seed start from the same parameters and see the same videos, times and noise;
baselines differ by rounding only. Losses are the squared errors of held-out velocities, by time:
1 is noise. Networks that were trained with dense attention in BF16 are also evaluated with FP8,
with sparse attention and with both, which they have not seen in training.
"""

from experiments.study import command
from experiments.video_study.study import STUDY


def main() -> None:
    """Measures what FP8 and sparse attention cost, and shows it."""
    command.main(STUDY, __doc__)


if __name__ == "__main__":
    main()
