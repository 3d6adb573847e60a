"""Draw the loss curves of runs.

  coat plot runs/coat                                runs/coat/plot.png
  coat plot runs/bf16 runs/coat                      runs/plot.png
  coat plot runs/* --over tokens --out curves.png    against tokens
  coat plot runs/a runs/b --names AdamW "FP8 AdamW"  other names than the folders'
  coat plot runs/coat --fp8 underflow                with a statistic that telemetry recorded

Of several runs the first is the baseline, wide and pale below the others. Points are held-out
losses. An earlier picture is replaced. --fp8 is for one run alone.
"""

import argparse
from pathlib import Path

from coat_jax.cli.arguments import add_count
from coat_jax.files import expand_user
from coat_jax.numerics.statistics import Statistics
from coat_jax.printable import printable
from coat_jax.telemetry import MomentStatistics
from coat_jax.training.report import plot

STATISTICS = tuple(dict.fromkeys((*Statistics._fields, *MomentStatistics._fields)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    axes = ("steps", "tokens", "time")
    add("--over", choices=axes, default="steps", help="the x axis (default: %(default)s)")
    mean = "each point is the mean of N records (default: a fiftieth, at least 10)"
    add_count(parser, "--smooth", None, mean)
    place = "default: plot.png in the run's folder; of several runs, beside the first one's folder"
    add("--out", type=Path, metavar="FILE.png", help=f"the picture ({place})")
    add("--names", nargs="+", default=(), metavar="NAME", help="names of the runs, in order")
    add("--fp8", choices=STATISTICS, help="add curves of what --telemetry.every recorded")


def run(options: argparse.Namespace) -> int:
    """Draws, and prints the name of the picture."""
    paths = [expand_user(path) for path in options.runs]
    alone = len(paths) == 1 and paths[0].is_dir()
    folder = paths[0] if alone else paths[0].absolute().parent
    out = folder / "plot.png" if options.out is None else expand_user(options.out)
    settings = {"over": options.over, "smooth": options.smooth, "names": options.names}
    plot.draw(paths, out, **settings, statistic=options.fp8)
    print(printable(str(out)))
    return 0
