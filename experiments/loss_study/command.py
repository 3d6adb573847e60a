"""The command of a study that trains arms of `loss_study`: which runs, for how long, and where."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from coat_jax.errors import UserError
from experiments.command import RESULTS
from experiments.loss_study import results
from experiments.loss_study.arm import Settings
from experiments.loss_study.arms import ARMS, SIZES
from experiments.loss_study.measure import Call, measure, plan
from experiments.row_files import Row


def add_arguments(parser: argparse.ArgumentParser, *, arms: Sequence[str], work: str) -> None:
    """Declares the arguments.

    Args:
        parser: of the study.
        arms: that are trained by default.
        work: the name of its folder among the machine's temporary files.
    """
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="add these results")
    parser.add_argument("--plan", action="store_true", help="only print what would run")
    parser.add_argument("--size", choices=SIZES, help="size of the model")
    chosen = f"what to train; default: {' '.join(arms)}"
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, metavar="ARM", default=list(arms), help=chosen
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of each arm")
    parser.add_argument("--steps", type=int, help="steps of a run (default: depends on --size)")
    parser.add_argument("--batch", type=int, help="sequences of a step (same default)")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence (same default)")
    parser.add_argument("--accumulation", type=int, help="microbatches (same default)")
    parser.add_argument("--learning-rate", type=float, help="the highest rate (same default)")
    parser.add_argument("--side-by-side", type=int, default=4, help="runs on each GPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the call")
    parser.add_argument("--text", type=int, default=300, help="megabytes of text at most")
    parser.add_argument("--text-from", type=Path, nargs="+", help="folders; default: the machine's")
    folder = Path(tempfile.gettempdir()) / work
    parser.add_argument(
        "--work", type=Path, default=folder, help="for text, compiled programs and stopped runs"
    )
    parser.add_argument("--out", type=Path, help="folder for the results")


def carry_out(
    options: argparse.Namespace, file: str, show: Callable[[list[Row], Path], object], **more: Any
) -> None:
    """Plans, measures, merges, or shows what was measured.

    Args:
        options: those of `add_arguments`.
        file: the name of the results.
        show: prints tables of rows, and draws them into a folder.
        more: fields of `Call`.
    """
    committed, out = RESULTS / file, options.out or RESULTS
    if options.merge:
        rows = results.merge(committed, options.merge)
        print(f"{committed.name} has {len(rows)} runs.")
        show(rows, RESULTS)
        return
    if options.size is None:
        show(results.read([committed, out / file]), out)
        return
    try:
        call = _call(options, committed, out / file, **more)
        if options.plan:
            plan(call)
            return
        failed = measure(call)
    except UserError as error:
        sys.exit(f"error: {error}")
    show(results.read([committed, call.out]), out)
    sys.exit(1 if failed else 0)


def _call(options: argparse.Namespace, known: Path, out: Path, **more: Any) -> Call:
    size = SIZES[options.size]
    given = {field.name: getattr(options, field.name, None) for field in fields(Settings)}
    changes = {name: value for name, value in given.items() if value is not None}
    settings = replace(size.settings, **changes)
    if settings.sequence > size.model.context:
        raise UserError(
            f"--sequence {settings.sequence} is longer than the context of size {options.size}, "
            f"{size.model.context} tokens. Lower it, or choose a larger size."
        )
    return Call(
        arms={name: ARMS[name] for name in options.arms},
        size_name=options.size,
        size=size,
        seeds=options.seeds,
        settings=settings,
        work=options.work,
        known=known,
        out=out,
        side_by_side=options.side_by_side,
        seconds=options.minutes * 60,
        text=options.text * 1_000_000,
        text_from=options.text_from,
        **more,
    )
