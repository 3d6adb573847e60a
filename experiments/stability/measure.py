"""One call of `stability`: which rows are missing, how long they may take, and measuring them."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from coat_jax import models
from coat_jax.training.data.corpus import load
from experiments.row_files import Row
from experiments.stability import results
from experiments.stability.arm import Arm, Settings, Size
from experiments.stability.events import entropy, events_of
from experiments.stability.train import Signals, program_of, train


class Call(NamedTuple):
    """The arguments of a call.

    Attributes:
        arms: by name.
        size_name: of the model.
        size: the model, its settings and learning rates.
        settings: of each run.
        seeds: how many.
        known: a file of results that are not measured again.
        out: the file for new results; what it has is not measured again either.
        seconds: for all of it.
    """

    arms: Mapping[str, Arm]
    size_name: str
    size: Size
    settings: Settings
    seeds: int
    known: Path
    out: Path
    seconds: float


class Work(NamedTuple):
    """A program's worth of runs: an arm, and its rows that are missing, one per learning rate."""

    name: str
    arm: Arm
    rows: list[Row]

    @property
    def runs(self) -> int:
        """How many."""
        return sum(len(row["seeds"]) for row in self.rows)


def measure(call: Call) -> None:
    """Measures what is missing within the time limit; writes rows as soon as they are measured."""
    end = time.monotonic() + call.seconds
    corpus = load()
    ceiling = entropy(corpus.train)
    work = missing(call, corpus.digest)
    longest: dict[str, float] = {}  # of an arm's programs, in seconds
    for done, one in enumerate(work):
        begin = time.monotonic()
        if begin + longest.get(one.name, 0.0) > end:
            print(f"{len(work) - done} of {len(work)} programs are left for the next call.")
            break
        print(f"{one.name}: {one.runs} runs", end=" ", flush=True)
        seeds = np.concatenate([row["seeds"] for row in one.rows])
        rates = np.concatenate(
            [np.full(len(row["seeds"]), row["learning_rate"]) for row in one.rows]
        )
        grid = train(one.arm, call.size, call.settings, corpus.train, seeds, rates, report=_dot)
        seconds = time.monotonic() - begin
        longest[one.name] = max(longest.get(one.name, 0.0), seconds)
        events = [events_of(losses, ceiling) for losses in grid.signals.loss]
        rows, first = [], 0
        for row in one.rows:
            own = slice(first, first + len(row["seeds"]))
            signals = Signals(*(signal[own] for signal in grid.signals))
            rows.append(
                results.measured(
                    row, events[own], signals, grid.skipped[own], ceiling, seconds / one.runs
                )
            )
            first = own.stop
        results.keep(call.out, rows)
        failed = sum(one.outcome != "trained" for one in events)
        print(f" {seconds:.0f} s, {failed} failed", flush=True)


def _dot(step: int) -> None:
    del step
    print(".", end="", flush=True)


def missing(call: Call, text: str) -> list[Work]:
    """The programs that have rows to measure: all arms of some seeds before those of the next."""
    known = {results.key_of(row) for row in results.read([call.known, call.out])}
    work = []
    for first in range(0, call.seeds, call.size.together):
        seeds = range(first, min(first + call.size.together, call.seeds))
        for name, arm in call.arms.items():
            rows = [
                results.row_of(
                    name, arm, call.size_name, call.size, call.settings, rate, seeds, text
                )
                for rate in call.size.learning_rates
            ]
            rows = [row for row in rows if row["key"] not in known]
            if rows:
                work.append(Work(name, arm, rows))
    return work


# --- Planning --------------------------------------------------------------------------------


FEW = 2  # runs of a program whose cost is counted


class Cost(NamedTuple):
    """What XLA counts in the compiled program, for one run and one step."""

    flops: float
    bytes: float


def cost_of(arm: Arm, size: Size, settings: Settings) -> Cost:
    """Compiles a step of a few runs for this machine, and asks XLA.

    Layers are not in a loop here, because XLA counts the body of a loop once.
    """
    unrolled = replace(size, model=replace(size.model, scan=False))
    program = program_of(arm, unrolled, settings)
    seeds = jax.ShapeDtypeStruct((FEW,), np.uint32)
    rates = jax.ShapeDtypeStruct((FEW,), np.float32)
    text = jax.ShapeDtypeStruct((1 << 16,), np.uint8)
    states = jax.eval_shape(program.init, seeds)
    lowered = jax.jit(program.step, donate_argnums=0).lower(states, text, seeds, rates, 0)
    counted = lowered.compile().cost_analysis()
    return Cost(counted["flops"] / FEW, counted["bytes accessed"] / FEW)


def plan(call: Call) -> None:
    """Prints what would run, and what it costs by XLA's count."""
    work = missing(call, load().digest)
    settings, runs = call.settings, sum(one.runs for one in work)
    tokens = settings.steps * settings.batch * settings.sequence
    print(
        f"{call.size_name}: {models.parameters_count(call.size.model) / 1e6:.2f} M parameters, "
        f"{settings.steps} steps of {settings.batch} x {settings.sequence} = {tokens:,} bytes a "
        f"run.\n{runs} runs in {len(work)} programs have no row yet."
    )
    for name in dict.fromkeys(one.name for one in work):
        cost = cost_of(call.arms[name], call.size, settings)
        steps = settings.steps * sum(one.runs for one in work if one.name == name)
        print(
            f"{name:28}{cost.flops * steps / 1e12:10.1f} TFLOP, "
            f"{cost.bytes * steps / 1e12:8.2f} TB moved"
        )
