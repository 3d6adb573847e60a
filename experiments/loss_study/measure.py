"""One call of `loss_study`: which runs have no row yet, how long they take, and making them."""

import dataclasses
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from coat_jax import models
from experiments.loss_study import queue, results
from experiments.loss_study import text as texts
from experiments.loss_study.arm import Arm, Settings, Size
from experiments.loss_study.queue import Work
from experiments.row_files import Row
from experiments.workers import count_gpus

# Seconds on an H200 machine with 16 cores: text and tokens; a process until its first step.
PREPARING, STARTING = 90, 45


class Call(NamedTuple):
    """The arguments of a call.

    Attributes:
        arms: by name.
        size_name: of the model.
        size: the model, and the settings to train it with.
        seeds: of each arm.
        settings: of each run.
        work: the folder for text, compiled programs and runs that were stopped.
        known: a file of results that are not measured again.
        out: the file for new results; what it has is not measured again either.
        side_by_side: runs on each GPU.
        seconds: for all of it.
        text: bytes of text at most.
        text_from: folders to read, or None for those of the machine.
        module: of the processes that make runs.
        row_of: names a run before it is made.
        cost_of: a run, in tokens that are trained on; for estimates.
        compiling: seconds in which a run compiles programs after its first step; likewise.
    """

    arms: Mapping[str, Arm]
    size_name: str
    size: Size
    seeds: Sequence[int]
    settings: Settings
    work: Path
    known: Path
    out: Path
    side_by_side: int
    seconds: float
    text: int
    text_from: list[Path] | None
    module: str = queue.RUN
    row_of: Callable[..., Row] = results.row_of
    cost_of: Callable[[Settings], float] = operator.attrgetter("tokens")
    compiling: float = 0.0


def measure(call: Call) -> dict[str, str]:
    """Prepares the text and makes the runs; returns those that failed, and why."""
    begin = time.monotonic()
    notes = texts.prepare(
        call.work / "text",
        call.size.model.vocab,
        places=call.text_from or texts.roots(),
        limit=call.text,
    )
    tokens = len(texts.load(call.work / "text", "train", call.size.model.vocab))
    print(
        f"{tokens / 1e6:.1f} M tokens from {notes['train']['bytes'] / 1e6:.0f} MB of text, what is "
        f"left of {notes['read']['bytes'] / 1e6:.0f} MB without near-duplicates; a run reads "
        f"{call.settings.tokens / 1e6:.1f} M. {time.monotonic() - begin:.0f} s.",
        flush=True,
    )
    plan(call)
    texts.require_rows(tokens, call.settings.rows, call.settings.sequence)
    gpus = count_gpus()
    outcome = queue.run(
        missing(call, notes["digest"]),
        call.work,
        gpus=gpus,
        side_by_side=call.side_by_side,
        seconds=call.seconds - (time.monotonic() - begin),
        take=lambda row: keep(call.out, row),
        module=call.module,
    )
    print(
        f"{len(outcome.finished)} runs finished, {len(outcome.stopped)} stopped, "
        f"{len(outcome.failed)} failed, {len(outcome.left)} not started: {call.out}"
    )
    return outcome.failed


def keep(path: Path, row: Row) -> None:
    """Adds a row to a file of results at once."""
    results.write(path, [*results.read([path]), row])


def missing(call: Call, text: str) -> list[Work]:
    """The runs that have no row, all arms of one seed before those of the next."""
    known = {results.key_of(row) for row in results.read([call.known, call.out])}
    work = []
    for seed in call.seeds:
        for name, arm in call.arms.items():
            row = call.row_of(name, arm, call.size_name, call.size, seed, call.settings, text)
            job = {
                "arm": name,
                "size": call.size_name,
                "seed": seed,
                "settings": row["settings"],
                "text": str(call.work / "text"),
            }
            if row["key"] not in known:
                # A run that was stopped does not continue with other code.
                folder = f"{row['key']}_{row['code']}"
                work.append(Work(f"{name}/{seed}", folder, job, row))
    return work


def plan(call: Call) -> None:
    """Prints what would run, and an estimate of how long on one H200."""
    rows = results.read([call.known, call.out])
    if (call.work / "text" / texts.NOTES).exists():
        text = texts.notes(call.work / "text")["digest"]
    else:
        text = _likely_text(rows, call.size_name, call.settings)
    work = missing(call, text)
    settings = call.settings
    of_run = call.cost_of(settings) / call.size.tokens_per_second + call.compiling
    print(
        f"{call.size_name}: {models.parameters_count(call.size.model) / 1e6:.1f} M parameters, "
        f"{settings.steps} steps of {settings.batch} x {settings.sequence} tokens = "
        f"{settings.tokens / 1e6:.1f} M tokens a run.\n"
        f"{len(work)} of {len(call.arms) * len(call.seeds)} runs have no row yet: "
        f"{', '.join(one.name for one in work) or 'nothing to do'}."
    )
    seconds = STARTING + len(work) * of_run
    print(
        f"About {seconds / 60:.1f} of {call.seconds / 60:.1f} minutes on one H200: {STARTING} s to "
        f"start and {of_run:.0f} s for a run that has the GPU alone; {PREPARING} s more where text "
        "and tokens are not there yet."
    )


def _likely_text(rows: Sequence[Row], size_name: str, settings: Settings) -> str:
    """The text of most runs with these settings, or else of most runs.

    Machines that are installed alike have the same text.
    """
    run = size_name, dataclasses.asdict(settings)
    same = [row["text"] for row in rows if (row["size"], row["settings"]) == run]
    found = Counter(same or [row["text"] for row in rows]).most_common(1)
    return str(found[0][0]) if found else ""
