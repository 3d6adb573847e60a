"""The command line of a study: lists, plans, measures, merges and shows.

Does not import JAX's devices: the processes that measure need the memory of all GPUs.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, fields, replace
from pathlib import Path

from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.models import ModelConfig
from coat_jax.training.families import family_of
from experiments import row_files
from experiments.command import RESULTS, bare_parser_of
from experiments.row_files import digest
from experiments.study.description import differences
from experiments.study.queue import Queue, Work
from experiments.study.rows import keep, key_of
from experiments.study.study import Call, Study
from experiments.workers import count_gpus

STARTING = 45  # seconds until the first step of a process, on an H200 machine with 16 cores
ENDED = ("finished", "stopped", "not started")


def main(study: Study, explanation: str | None) -> None:
    """The program of a study."""
    options = parser_of(study, explanation).parse_args()
    try:
        succeeded = carry_out(study, options)
    except UserError as error:
        sys.exit(f"error: {error}")
    sys.exit(0 if succeeded else 1)


def parser_of(study: Study, explanation: str | None) -> argparse.ArgumentParser:
    """The arguments of a study: those of all studies, of its settings, and its own."""
    parser = bare_parser_of(explanation)
    add = parser.add_argument
    add("--list", action="store_true", help="print the arms and sizes")
    add("--plan", action="store_true", help="print which runs are missing")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="add these results to the committed")
    add("--draw", action="store_true", help="also draw the results, into the folder of --out")
    add("--size", choices=study.sizes, help="train a model of this size")
    usual = " ".join(study.usual)
    add("--arms", nargs="+", choices=study.arms, metavar="ARM", default=list(study.usual),
        help=f"what to train (default: {usual})")  # fmt: skip
    add("--seeds", nargs="+", type=_seeds, default=[[0]], metavar="SEED",
        help="of each arm: 0 1 2, or 0:64 for 64 of them (default: 0)")  # fmt: skip
    for field in fields(next(iter(study.sizes.values())).settings):
        kind = field.type if isinstance(field.type, type) else float
        name = f"--{field.name.replace('_', '-')}"
        add(name, type=kind, metavar="N", help=f"{field.metadata['help']} (default: the size's)")
    add("--side-by-side", type=int, default=study.side_by_side, metavar="N",
        help="runs on each GPU (default: %(default)s)")  # fmt: skip
    add("--minutes", type=float, default=9.0, help="time limit (default: %(default)s)")
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / study.name, metavar="FOLDER",
        help="for text, compiled programs and stopped runs (default: %(default)s)")  # fmt: skip
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="for the results (default: beside the committed ones)",
    )
    study.declare(parser)
    return parser


def _seeds(text: str) -> list[int]:
    first, colon, end = text.partition(":")
    return list(range(int(first), int(end))) if colon else [int(first)]


def carry_out(study: Study, options: argparse.Namespace) -> bool:
    """Does what the command line asks for; returns whether no run failed."""
    folder = options.out or RESULTS
    committed, out = RESULTS / f"{study.name}.json", folder / f"{study.name}.json"
    if options.list:
        _list(study)
        return True
    if options.merge:
        study.read(options.merge)  # refuses rows of other studies
        rows = keep(committed, [row for path in options.merge for row in row_files.read([path])])
        print(f"{committed.name} has {len(rows)} rows.")
    succeeded = True
    chosen: dict[str, object] = {}
    if options.size is not None:
        call = call_of(study, options, committed, out)
        if options.plan:
            plan(study, call, study.prepare(call, study.read([committed, out]), True))
            return True
        succeeded = measure(study, call)
        chosen = {"size": call.size, "settings": asdict(call.settings)}
    rows = study.read([committed, out])
    rows = [row for row in rows if chosen == {name: row[name] for name in chosen}]
    if not rows:
        print("There are no results yet. Name a --size to measure some.")
    study.show(rows, folder if options.draw else None)
    return succeeded


def _list(study: Study) -> None:
    for name, arm in study.arms.items():
        print(f"{name:36}{differences(arm) or 'BF16, with parameters and moments in FP32'}")
    for name, size in study.sizes.items():
        print(f"{name:36}{_parameters(size.model) / 1e6:.1f} M parameters")


def _parameters(model: ModelConfig) -> int:
    return models.parameters_count(model, module=family_of(model).module)


def call_of(study: Study, options: argparse.Namespace, known: Path, out: Path) -> Call:
    """The arguments of a call; raises if they are impossible."""
    size = study.sizes[options.size]
    given = {field.name: getattr(options, field.name) for field in fields(size.settings)}
    changes = {name: value for name, value in given.items() if value is not None}
    settings = replace(size.settings, **changes)
    if changes.get("sequence", 0) > (context := getattr(size.model, "context", 0)):
        raise UserError(
            f"--sequence {settings.sequence} is longer than the context of size {options.size}, "
            f"{context} tokens. Lower it, or choose a larger size."
        )
    seeds = dict.fromkeys(seed for some in options.seeds for seed in some)
    return Call(
        arms=[*dict.fromkeys(options.arms)],
        size=options.size,
        settings=settings,
        seeds=[*seeds],
        work=options.work,
        known=known,
        out=out,
        side_by_side=options.side_by_side,
        seconds=60 * options.minutes,
        options=options,
    )


def measure(study: Study, call: Call) -> bool:
    """Prepares the text and makes the runs that are missing; returns whether none failed."""
    begin = time.monotonic()
    text = study.prepare(call, study.read([call.known, call.out]), False)
    plan(study, call, text)
    queue = Queue(
        study.module,
        call.work,
        count_gpus(),
        call.side_by_side,
        take=lambda rows: keep(call.out, rows),
    )
    left = call.seconds - (time.monotonic() - begin)
    outcomes = queue.run(missing(study, call, text), left)
    counts = Counter(how if how in ENDED else "failed" for how in outcomes.values())
    print(", ".join(f"{count} {how}" for how, count in counts.items()) or "nothing to do", call.out)
    return not counts["failed"]


def missing(study: Study, call: Call, text: str) -> list[Work]:
    """The runs that have no row, all arms of some seeds before those of the next."""
    known = {key_of(row) for row in study.read([call.known, call.out])}
    together = study.together(call)
    works = []
    for first in range(0, len(call.seeds), together):
        seeds = call.seeds[first : first + together]
        for arm in call.arms:
            rows = study.rows_of(call, arm, seeds, text)
            if rows := [row for row in rows if row["key"] not in known]:
                name = f"{arm}/{'-'.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))}"
                # A run that was stopped does not continue with other code.
                key = f"{digest([row['key'] for row in rows])}_{rows[0]['code']}"
                works.append(Work(name, key, rows))
    return works


def plan(study: Study, call: Call, text: str) -> None:
    """Prints what would run, and an estimate of how long on one H200."""
    works = missing(study, call, text)
    names = ", ".join(work.name for work in works) or "nothing to do"
    parameters = _parameters(study.sizes[call.size].model)
    print(f"{call.size}: {parameters / 1e6:.1f} M parameters, {call.settings}")
    print(f"{len(works)} runs have no row yet: {names}.", flush=True)
    if study.seconds_of is not None:
        of_run = study.seconds_of(call)
        minutes = (STARTING + len(works) * of_run) / 60
        print(
            f"About {minutes:.1f} of {call.seconds / 60:.1f} minutes on one H200: {STARTING} s to "
            f"start, and {of_run:.0f} s for a run that has the GPU alone."
        )
