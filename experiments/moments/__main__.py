"""Measures errors of updates whose moments have 8 bits: see `experiments.moments`.

python -m experiments.moments once               three minutes on two CPU cores
python -m experiments.moments muon               as long
python -m experiments.moments muon --steps 30    smoke test
"""

import time

from experiments import records
from experiments.command import parser_of
from experiments.moments import muon, once

KINDS = {"once": once, "muon": muon}


def main() -> None:
    """Measures, writes the figures and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--seed", type=int, default=0, help="of model and batches")
    options = parser.parse_args()
    kind = KINDS[options.kind]
    started = time.perf_counter()
    figures = kind.measure(options.steps or kind.STEPS, options.seed)
    figures["seconds"] = round(time.perf_counter() - started)
    records.write(options.out / kind.FILE, figures)
    kind.show(figures)


if __name__ == "__main__":
    main()
