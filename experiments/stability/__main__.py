"""How stable training is in small formats, over seeds and learning rates.

    python -m experiments.stability --list                 the arms and sizes
    python -m experiments.stability --size 5M --plan       what would run, and what it costs
    python -m experiments.stability --size 5M --formats bf16 e8m3 coat --minutes 9 --out DIR
    python -m experiments.stability --merge FILE...        adds results to the committed file
    python -m experiments.stability --draw                 tables and pictures of what is there

All seeds and learning rates of a format are one program. A run that has a row in the results is not
measured again, so a call continues where the last one stopped. The text is the source of Python's
standard library, as bytes. `--size tiny` runs on any CPU.
"""

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path

from coat_jax import models
from coat_jax.errors import UserError
from experiments.command import RESULTS, bare_parser_of
from experiments.stability import results
from experiments.stability.arm import Settings, differences
from experiments.stability.arms import ARMS, BASELINE, SIZES
from experiments.stability.measure import Call, measure, plan
from experiments.stability.picture import MOST, draw, draw_curves
from experiments.stability.table import show


def main() -> None:
    """Plans, measures, merges, or shows what was measured."""
    options = _options()
    committed, out = RESULTS / results.FILE, (options.out or RESULTS) / results.FILE
    try:
        if options.list:
            _list()
            return
        if options.merge:
            rows = results.keep(committed, results.read(options.merge))
            print(f"{committed.name} has {sum(len(row['seeds']) for row in rows)} runs.")
        if options.size is not None:
            call = _call(options, committed, out)
            if options.plan:
                plan(call)
                return
            measure(call)
        _show(results.read([committed, out]), out.parent, options)
    except UserError as error:
        sys.exit(f"error: {error}")


def _list() -> None:
    for name, arm in ARMS.items():
        print(f"{name:28}{differences(arm)}")
    for name, size in SIZES.items():
        count = models.parameters_count(size.model) / 1e6
        rates = ", ".join(f"{rate:g}" for rate in size.learning_rates)
        print(f"{name:28}{count:.2f} M parameters, {size.settings.steps} steps, rates {rates}")


def _call(options: argparse.Namespace, committed: Path, out: Path) -> Call:
    size = SIZES[options.size]
    given = {field.name: getattr(options, field.name, None) for field in fields(Settings)}
    changes = {name: value for name, value in given.items() if value is not None}
    if options.learning_rates:
        size = replace(size, learning_rates=tuple(sorted(set(options.learning_rates))))
    if options.together:
        size = replace(size, together=options.together)
    settings = replace(size.settings, **changes)
    if settings.sequence > size.model.context:
        raise UserError(
            f"sequence={settings.sequence} is longer than the context of {options.size}, which is "
            f"{size.model.context}."
        )
    return Call(
        arms={name: ARMS[name] for name in dict.fromkeys(options.formats)},
        size_name=options.size,
        size=size,
        settings=settings,
        seeds=options.seeds,
        known=committed,
        out=out,
        seconds=60 * options.minutes,
    )


def _show(rows: list[results.Row], folder: Path, options: argparse.Namespace) -> None:
    if not rows:
        print("There are no results yet. Name a --size to measure some.")
    for found in results.conditions_of(rows):
        show(found)
        if options.draw:
            print(draw(found, folder, options.formats if options.size else None))
            if len(found.arms) > MOST:
                print(draw_curves(found, folder))


def _options() -> argparse.Namespace:
    parser = bare_parser_of(__doc__)
    parser.add_argument("--list", action="store_true", help="print arms and sizes")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="add these results")
    parser.add_argument("--plan", action="store_true", help="only print what would run")
    parser.add_argument("--draw", action="store_true", help="draw what is there, too")
    parser.add_argument("--size", choices=SIZES, help="size of the model")
    parser.add_argument(
        "--formats", nargs="+", choices=ARMS, metavar="ARM", default=[BASELINE, "e8m3", "coat"],
        help="see --list (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--seeds", type=_at_least_one, default=64, help="how many (%(default)s)")
    parser.add_argument(
        "--learning-rates", type=_positive, nargs="+", metavar="RATE", help="default: the size's"
    )
    parser.add_argument(
        "--together", type=_at_least_one, metavar="N", help="seeds in one program (same default)"
    )
    for name, of in (("steps", "a run"), ("batch", "a step"), ("sequence", "a window")):
        parser.add_argument(f"--{name}", type=_at_least_one, help=f"{name} of {of} (same default)")
    parser.add_argument(
        "--clip-norm", type=_positive, metavar="NORM", help="of gradients; 1e9 clips nothing (1)"
    )
    parser.add_argument(
        "--final-ratio", type=float, metavar="SHARE",
        help="of the highest learning rate, to which it falls; 1 keeps it constant (0)",
    )  # fmt: skip
    parser.add_argument("--minutes", type=_positive, default=9.0, help="time limit of the call")
    parser.add_argument("--out", type=Path, help="folder for the results")
    return parser.parse_args()


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be above 0, and finite")
    return number


if __name__ == "__main__":
    main()
