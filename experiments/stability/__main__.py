"""How stable training is in small formats, over seeds and learning rates.

    python -m experiments.stability --list                 the arms and sizes
    python -m experiments.stability --plan --size 5M --seeds 0:64
    python -m experiments.stability --size 5M --seeds 0:64 --arms bf16 e8m3 coat --out DIR
    python -m experiments.stability --merge FILE...        adds results to the committed file
    python -m experiments.stability --draw                 tables and pictures of what is there

Some seeds of a format at all learning rates are one program (`--together`). What has a row in the
results is not measured again, so a call continues where the last one stopped. The text is the
source of Python's standard library, as bytes.

`--size tiny --seeds 0:4 --arms bf16 coat --learning-rates 0.001 0.01` runs on any CPU.
"""

from experiments.stability.study import STUDY
from experiments.study import command


def main() -> None:
    """Measures how often runs fail, and shows it."""
    command.main(STUDY, __doc__)


if __name__ == "__main__":
    main()
