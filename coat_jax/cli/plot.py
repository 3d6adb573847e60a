"""Draw the loss curves of runs: a picture, and a page to explore beside it.

  coat plot runs/coat                                runs/coat/plot.png and plot.html
  coat plot runs/bf16 runs/coat                      runs/plot.png and plot.html
  coat plot runs/* --over tokens --out curves.png    against tokens
  coat plot runs/a runs/b --names AdamW "FP8 AdamW"  other names than the folders'
  coat plot runs/coat --fp8 underflow --out fp8.png  what telemetry recorded, as a heat map

Of several runs the first is the baseline, wide and pale below the others. Points are held-out
losses. The page works offline, in any browser. An earlier picture or page is replaced; an .html
that is no page of this command is not. A heat map is a picture of one run alone.
"""

import argparse
import sys
from pathlib import Path

from coat_jax.errors import UserError
from coat_jax.files import expanded, is_folder
from coat_jax.printable import printable
from coat_jax.training.report.titles import TITLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument(
        "--over",
        choices=("steps", "tokens", "time"),
        default="steps",
        help="the x axis (default: %(default)s)",
    )
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="N",
        help="each point is the mean of N records; 1 does not smooth (default: a fiftieth of the "
        "shortest run, at least 10)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.png",
        help="the picture; the page has the same name with .html (default: plot.png in the run's "
        "folder; for several runs, in the folder that holds the first)",
    )
    parser.add_argument(
        "--names", nargs="+", default=(), metavar="NAME", help="what to call the runs, in order"
    )
    parser.add_argument(
        "--fp8",
        choices=TITLES,
        metavar="STATISTIC",
        help=f"draw what --telemetry.every recorded of tensors in FP8: {', '.join(TITLES)}",
    )


def run(options: argparse.Namespace) -> int:
    """Draws, and prints the names of the files."""
    from coat_jax.training.report import heat
    from coat_jax.training.report.plot import draw

    paths = [expanded(path) for path in options.runs]
    alone = len(paths) == 1 and is_folder(paths[0])
    folder = paths[0] if alone else paths[0].absolute().parent
    out = folder / "plot.png" if options.out is None else expanded(options.out)
    if options.fp8 is not None:
        if len(paths) > 1:
            raise UserError(f"A heat map is of one run, not of {len(paths)}.")
        heat.draw(paths[0], out, statistic=options.fp8)
        print(printable(str(out)))
        return 0
    settings = {"over": options.over, "smooth": options.smooth, "names": options.names}
    draw(paths, out, **settings, note=lambda text: print(text, file=sys.stderr))
    print(printable(f"{out}\n{out.with_suffix('.html')}"))
    return 0
