"""Shows how often each arm fails, and its loss."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import records
from experiments.row_files import Row
from experiments.stability.arms import ARMS, BASELINE
from experiments.stability.conditions import Conditions, Run, Runs, conditions_of
from experiments.stability.failures import Paired, Rate, paired, wilson
from experiments.study import tables
from experiments.study.statistics import Cost, cost_of, holm

EXCESS = 4  # percent of loss above the baseline's; what is further away is not drawn
# Those that are drawn, where they were measured.
DRAWN = ("bf16", "e8m3", "e5m2", "e4m3", "e5m2_unscaled", "e4m3_unscaled", "coat", "params_bf16")


class Verdict(NamedTuple):
    """An arm under all learning rates.

    Attributes:
        failed: its runs that diverged or were stuck.
        by_rate: the same at each learning rate.
        paired: its failures against the baseline's; None for the baseline, and without any run
            that both have.
        p: that of `paired`, corrected for the number of arms; NaN without it.
    """

    failed: Rate
    by_rate: dict[float, Rate]
    paired: Paired | None
    p: float


def verdicts(found: Conditions) -> dict[str, Verdict]:
    """Every arm, in the order of `ARMS`, compared with the baseline."""
    order = [arm for arm in ARMS if arm in found.arms]
    order += [arm for arm in found.arms if arm not in ARMS]
    pairs = [compared(found, arm) for arm in order]
    ps = holm([one.p if one else math.nan for one in pairs])
    verdicts = {}
    for arm, one, p in zip(order, pairs, ps, strict=True):
        by_rate = {rate: failures([*runs.values()]) for rate, runs in found.arms[arm].items()}
        counts, runs = zip(*((rate.count, rate.runs) for rate in by_rate.values()), strict=True)
        verdicts[arm] = Verdict(wilson(sum(counts), sum(runs)), by_rate, one, p)
    return verdicts


def failures(runs: Sequence[Run]) -> Rate:
    """How many runs do not train."""
    return wilson(sum(run.events.outcome != "trained" for run in runs), len(runs))


def compared(found: Conditions, arm: str) -> Paired | None:
    """An arm's failures against the baseline's, over the runs that both have.

    None for the baseline, and without any run that both have.
    """
    if arm == BASELINE or BASELINE not in found.arms:
        return None
    return paired(_failed(found.arms[arm]), _failed(found.arms[BASELINE]))


def _failed(by_rate: Runs) -> dict[tuple[float, int], bool]:
    """Which runs do not train, by learning rate and seed."""
    return {
        (rate, seed): run.events.outcome != "trained"
        for rate, runs in by_rate.items()
        for seed, run in runs.items()
    }


def above_baseline(found: Conditions, arm: str) -> dict[float, Cost]:
    """By how much an arm's final losses are above those of the baseline, of the same seeds.

    By learning rate; those with fewer than two seeds or an infinite loss are left out.
    """
    means = {}
    for rate, runs in found.arms[arm].items():
        base = found.arms.get(BASELINE, {}).get(rate, {})
        pairs = [(run.events.final, base[s].events.final) for s, run in runs.items() if s in base]
        if len(pairs) > 1 and np.isfinite(pairs).all():
            own, other = np.log(pairs).T
            means[rate] = cost_of((own - other).tolist())
    return means


def all_runs(found: Conditions) -> Iterator[Run]:
    """The runs of all arms and learning rates."""
    return (run for arm in found.arms.values() for runs in arm.values() for run in runs.values())


def points(one: Paired | None) -> str:
    """A difference of shares and its interval, in percentage points."""
    if one is None:
        return ""
    return f"{100 * one.difference:+.1f} ({100 * one.low:+.1f} to {100 * one.high:+.1f})"


# --- Tables ----------------------------------------------------------------------------------


def show(rows: list[Row], folder: Path | None) -> None:
    """Prints the tables of each of the conditions, and draws them into a folder."""
    for found in conditions_of(rows):
        ceiling = f"byte frequencies alone: {found.ceiling:.2f} nats"
        tables.show(f"Runs that failed: {found.title}, on {found.device}", failure_rows(found))
        tables.show(
            f"Final loss above {BASELINE}'s, of the same seeds; {ceiling}", loss_rows(found)
        )
        if folder is not None:
            print(draw(found, folder))


def _rates(found: Conditions) -> list[float]:
    return sorted({rate for runs in found.arms.values() for rate in runs})


def failure_rows(found: Conditions) -> list[list[str]]:
    """Failures by arm, and how they differ from the baseline's over the same seeds."""
    rates = _rates(found)
    cells = [["arm", "all", *(f"{rate:g}" for rate in rates), "points above", "Holm p"]]
    for arm, verdict in verdicts(found).items():
        counts = [verdict.failed, *(verdict.by_rate.get(rate) for rate in rates)]
        line = [arm, *(f"{one.count}/{one.runs}" if one else "" for one in counts)]
        one = verdict.paired
        cells.append([*line, points(one), f"{verdict.p:.2g}" if one else ""])
    return cells


def loss_rows(found: Conditions) -> list[list[str]]:
    """By how much the final loss of each arm is above the baseline's, over the same seeds."""
    rates = _rates(found)
    cells = [["arm", *(f"{rate:g}" for rate in rates)]]
    for arm in (arm for arm in verdicts(found) if arm != BASELINE):
        means = above_baseline(found, arm)
        shown = (means.get(rate) for rate in rates)
        cells.append(
            [arm, *(f"{100 * m.mean:+.2f} ± {100 * m.half:.2f}" if m else "" for m in shown)]
        )
    return cells


# --- The picture -----------------------------------------------------------------------------


def draw(found: Conditions, folder: Path) -> Path:
    """Draws final losses, losses above the baseline's, and failures, over the learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = [arm for arm in DRAWN if arm in found.arms] or list(found.arms)
    path = folder / f"stability_{found.name}.png"
    with plt.rc_context(records.CHART | {"axes.grid.axis": "both"}):
        figure, panels = plt.subplots(1, 3, figsize=(15, 4.8))
        for axes, panel in zip(panels, (_losses, _excess, _failures), strict=True):
            for number, arm in enumerate(arms):
                panel(axes, found, arm, _look(number, arm), 1.05 ** (number - len(arms) / 2))
            axes.set_xscale("log")
            axes.set_xlabel("learning rate")
        panels[0].axhline(found.ceiling, color=records.PALE, ls="--", label="byte frequencies")
        panels[0].legend(fontsize=8)
        panels[0].set_title("final loss, nats: medians over seeds")
        panels[1].axhline(0, color=records.INK, lw=1.2)
        panels[1].set_ylim(-EXCESS, EXCESS)
        panels[1].set_title(f"loss above {BASELINE}'s, up to {EXCESS} %, 95 % intervals")
        panels[2].set_ylim(-3, 103)
        panels[2].set_title("runs that fail, %, with 95 % intervals")
        figure.suptitle(f"Stability of training: {found.title}, on {found.device}")
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)
    return path


def _look(number: int, arm: str) -> dict[str, Any]:
    """The baseline in ink, COAT in the accent's colour."""
    if arm == BASELINE:
        return {"color": records.INK, "lw": 2.2, "zorder": 3}
    accent, *others = records.LINES
    return {"color": accent if arm == "coat" else others[number % len(others)], "lw": 1.5}


def _losses(axes: Any, found: Conditions, arm: str, look: dict[str, Any], beside: float) -> None:
    del beside
    highest = 1.5 * max(float(run.signals[0, 0]) for run in all_runs(found))
    medians = {
        rate: min(np.median([run.events.final for run in runs.values()]), highest)
        for rate, runs in found.arms[arm].items()
    }
    axes.plot(list(medians), list(medians.values()), "o-", ms=4, label=arm, **look)


def _excess(axes: Any, found: Conditions, arm: str, look: dict[str, Any], beside: float) -> None:
    means = above_baseline(found, arm) if arm != BASELINE else {}
    axes.errorbar(
        [rate * beside for rate in means], [100 * one.mean for one in means.values()],
        yerr=[100 * one.half for one in means.values()], fmt="o", ms=4, elinewidth=1.2,
        **look | {"lw": 0},
    )  # fmt: skip


def _failures(axes: Any, found: Conditions, arm: str, look: dict[str, Any], beside: float) -> None:
    rates = {rate: failures([*runs.values()]) for rate, runs in found.arms[arm].items()}
    share, low, high = (
        np.array([100 * getattr(one, part) for one in rates.values()])
        for part in ("share", "low", "high")
    )
    axes.errorbar(
        [rate * beside for rate in rates], share, yerr=(share - low, high - share), fmt="o-", ms=4,
        elinewidth=0.8, **look,
    )  # fmt: skip
