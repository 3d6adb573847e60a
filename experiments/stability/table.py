"""What `stability` found, as numbers: how often each arm fails, and what predicts it."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from experiments.loss_study.statistics import holm
from experiments.stability.arms import ARMS, BASELINE
from experiments.stability.prediction import SIGNALS, Area, area_of, lead_of
from experiments.stability.results import Conditions, Sample
from experiments.stability.statistics import (
    Mean,
    Paired,
    Rate,
    excess,
    paired,
    sensitivity,
    wilson,
)

BEFORE = (0, 10, 20, 40)  # steps before divergence
SHORTLY = 10  # steps before divergence, where arms are shown one by one


class Verdict(NamedTuple):
    """An arm under all learning rates.

    Attributes:
        failed: its runs that diverged or were stuck.
        by_rate: the same at each learning rate.
        spiked: its runs that had a spike.
        recovered: those of them that recovered from every spike; None without any.
        paired: its failures against the baseline's; None for the baseline, and without any run
            that both have.
        p: that of `paired`, corrected for the number of arms; NaN without it.
        sensitivity: to the learning rate, in nats, over the learning rates that all arms have.
        best: the least median final loss of a learning rate.
    """

    failed: Rate
    by_rate: dict[float, Rate]
    spiked: Rate
    recovered: Rate | None
    paired: Paired | None
    p: float
    sensitivity: float
    best: float


def failures(sample: Sample) -> Rate:
    """How many runs do not train."""
    return wilson(sum(one.outcome != "trained" for one in sample.events), len(sample.events))


def spikes(samples: Iterable[Sample]) -> tuple[Rate, Rate | None]:
    """How many runs had a spike, and how many of these recovered."""
    runs = [one for sample in samples for one in sample.events]
    spiked = [one for one in runs if one.spikes]
    back = sum(one.recovered for one in spiked)
    return wilson(len(spiked), len(runs)), wilson(back, len(spiked)) if spiked else None


def verdicts(found: Conditions) -> dict[str, Verdict]:
    """Every arm, in the order of `ARMS`, compared with the baseline."""
    order = [arm for arm in ARMS if arm in found.arms]
    shared = set[float].intersection(*(set(found.arms[arm]) for arm in order)) if order else set()
    totals = {}
    for arm in order:
        rates = [failures(sample) for sample in found.arms[arm].values()]
        totals[arm] = wilson(sum(r.count for r in rates), sum(r.runs for r in rates))
    pairs = [compared(found, arm) for arm in order]
    ps = holm([one.p if one else math.nan for one in pairs])
    return {
        arm: Verdict(
            totals[arm],
            {rate: failures(sample) for rate, sample in found.arms[arm].items()},
            *spikes(found.arms[arm].values()),
            one,
            p,
            *_losses(found.arms[arm], shared),
        )
        for arm, one, p in zip(order, pairs, ps, strict=True)
    }


def compared(found: Conditions, arm: str, rate: float | None = None) -> Paired | None:
    """An arm's failures against the baseline's, over the runs that both have.

    Args:
        found: the runs.
        arm: which.
        rate: the only learning rate to count; by default all do.

    Returns:
        None for the baseline, and without any run that both have.
    """
    if arm == BASELINE or BASELINE not in found.arms:
        return None
    own, base = (
        {run: failed for run, failed in _failed(found.arms[one]).items() if rate in (None, run[0])}
        for one in (arm, BASELINE)
    )
    return paired(own, base)


def _failed(samples: dict[float, Sample]) -> dict[tuple[float, int], bool]:
    """Which runs do not train, by learning rate and seed."""
    return {
        (rate, seed): one.outcome != "trained"
        for rate, sample in samples.items()
        for seed, one in zip(sample.seeds, sample.events, strict=True)
    }


def _losses(samples: dict[float, Sample], shared: set[float]) -> tuple[float, float]:
    """The sensitivity over the shared learning rates, or over all if none is, and the best loss."""
    final = {rate: [one.final for one in s.events] for rate, s in samples.items()}
    first = max(float(s.signals.loss[:, 0].mean()) for s in samples.values())
    medians = [sorted(losses)[(len(losses) - 1) // 2] for losses in final.values()]
    compared = {rate: losses for rate, losses in final.items() if rate in shared} or final
    return sensitivity(compared, first), min(medians)


def above_baseline(found: Conditions, arm: str) -> dict[float, Mean]:
    """By how much an arm's final losses are above the baseline's, at each learning rate."""
    means = {}
    for rate, sample in found.arms[arm].items():
        base = found.arms.get(BASELINE, {}).get(rate)
        mean = base and excess(_final(sample), _final(base))
        if mean:
            means[rate] = mean
    return means


def _final(sample: Sample) -> dict[int, float]:
    return {s: one.final for s, one in zip(sample.seeds, sample.events, strict=True)}


# --- Rows ------------------------------------------------------------------------------------


def failure_rows(found: Conditions) -> list[list[str]]:
    """How often each arm fails, at each learning rate and in all."""
    by_arm = verdicts(found)
    rates = sorted({rate for one in by_arm.values() for rate in one.by_rate})
    header = ["arm", *(f"{rate:g}" for rate in rates), "failed", "95 % interval"]
    rows = [[*header, "spiked", "recovered", "sensitivity", "best loss"]]
    for arm, one in by_arm.items():
        by_rate = [_count(one.by_rate.get(rate)) for rate in rates]
        interval = f"{100 * one.failed.low:.0f} to {100 * one.failed.high:.0f} %"
        loss = f"{one.sensitivity:.2f}", f"{one.best:.3f}"
        spiked = _count(one.spiked), _count(one.recovered)
        rows.append([arm, *by_rate, _count(one.failed), interval, *spiked, *loss])
    return rows


def paired_rows(found: Conditions, at: float) -> list[list[str]]:
    """How the failures of each arm differ from the baseline's, over the same seeds.

    Args:
        found: the runs.
        at: a learning rate whose difference is shown on its own, beside that of all.
    """
    counts = ["pairs", "both fail", "only the arm fails", f"only `{BASELINE}` fails"]
    differences = ["difference", f"difference at {at:g}"]
    rows = [["arm", *counts, *differences, "p", "Holm p"]]
    for arm, verdict in verdicts(found).items():
        one = verdict.paired
        if one:
            numbers = map(str, (one.pairs, one.both, one.only_own, one.only_base))
            shown = points(one), points(compared(found, arm, at))
            rows.append([arm, *numbers, *shown, f"{one.p:.2g}", f"{verdict.p:.2g}"])
    return rows


def points(one: Paired | None) -> str:
    """A difference of shares and its interval, in percentage points."""
    if one is None:
        return ""
    return f"{100 * one.difference:+.1f} ({100 * one.low:+.1f} to {100 * one.high:+.1f})"


def loss_rows(found: Conditions) -> list[list[str]]:
    """By how much the final loss of each arm is above the baseline's, over the same seeds."""
    rates = sorted({rate for samples in found.arms.values() for rate in samples})
    rows = [["arm", *(f"{rate:g}" for rate in rates)]]
    for arm in (arm for arm in ARMS if arm in found.arms and arm != BASELINE):
        means = above_baseline(found, arm)
        shown = [means.get(rate) for rate in rates]
        rows.append(
            [arm, *(f"{100 * m.mean:+.2f} % ± {100 * m.half:.2f}" if m else "" for m in shown)]
        )
    return rows


def warning_rows(found: Conditions) -> list[list[str]]:
    """How well each signal tells runs that will diverge from others, and how early it warns."""
    samples, every = all_samples(found), found.settings.every
    columns = ["warned", "median lead", "false alarms"]
    rows = [["signal", *(f"{before} steps before" for before in BEFORE), *columns]]
    for signal in SIGNALS:
        areas = [area_of(samples, signal, every, before) for before in BEFORE]
        lead = lead_of(samples, signal, every)
        alarms = ["", "", ""]
        if not math.isnan(lead.median):
            shares = f"{100 * lead.warned:.0f} % of {lead.runs}", f"{100 * lead.false_alarms:.0f} %"
            alarms = [shares[0], f"{lead.median:.0f} steps", shares[1]]
        rows.append([_words(signal), *map(_area, areas), *alarms])
    return rows


def arm_warning_rows(found: Conditions) -> list[list[str]]:
    """How well each signal tells the runs of each arm that will diverge from the others.

    Learning rates with fewer than two runs of a kind are left out, as in `pooled`.
    """
    rows = [["arm", "diverged", "trained", *map(_words, SIGNALS)]]
    for arm in (arm for arm in ARMS if arm in found.arms):
        outcomes = {
            rate: Counter(one.outcome for one in sample.events)
            for rate, sample in found.arms[arm].items()
        }
        rates = [rate for rate, of in outcomes.items() if min(of["diverged"], of["trained"]) > 1]
        if rates:
            counts = [str(sum(outcomes[r][how] for r in rates)) for how in ("diverged", "trained")]
            samples = [found.arms[arm][rate] for rate in rates]
            areas = [area_of(samples, s, found.settings.every, SHORTLY) for s in SIGNALS]
            rows.append([arm, *counts, *map(_area, areas)])
    return rows


def _words(signal: str) -> str:
    return signal.replace("_", " ")


def _area(one: Area) -> str:
    return f"{one.mean:.2f} ± {one.error:.2f}" if one.pairs else ""


def _count(rate: Rate | None) -> str:
    return "" if rate is None else f"{rate.count}/{rate.runs}"


def all_samples(found: Conditions) -> list[Sample]:
    """The samples of all arms and learning rates."""
    return [sample for arm in found.arms.values() for sample in arm.values()]


def show(found: Conditions) -> None:
    """Prints all tables."""
    console = Console(width=160)
    title = (
        f"{found.size}, {found.settings.title}, on {found.device}, {found.commits}; byte "
        f"frequencies alone: {found.ceiling:.2f} nats"
    )
    losses = "Final loss above the baseline's, of the same seeds, with 95 % intervals"
    foretold = "Before divergence: area under the ROC curve ± its standard error; alarms"
    differences = "Failures against the baseline's, of the same seeds, in percentage points"
    highest = max(found.arms.get(BASELINE, {}), default=math.nan)
    tables = {
        title: failure_rows(found),
        differences: paired_rows(found, highest),
        losses: loss_rows(found),
        foretold: warning_rows(found),
        f"The same areas {SHORTLY} steps before divergence, by arm": arm_warning_rows(found),
    }
    for said, rows in tables.items():
        header, *body = rows
        table = Table(title=said)
        for number, column in enumerate(header):
            table.add_column(column, justify="right" if number else "left")
        for cells in body:
            table.add_row(*cells)
        console.print(table, highlight=False)
