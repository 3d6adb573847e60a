"""Draws what `stability` found: losses and failures over the learning rate, and warnings.

`draw` compares some arms in each panel; `draw_curves` gives every arm a panel of its own.
"""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments import records
from experiments.stability.arms import BASELINE
from experiments.stability.prediction import SIGNALS, area_of
from experiments.stability.results import Conditions, Sample
from experiments.stability.statistics import band
from experiments.stability.table import BEFORE, above_baseline, all_samples, verdicts

MOST = 8  # arms in a picture
ACROSS = 6  # small panels, each for an arm
EXCESS = 4  # percent of loss above the baseline's; what is further away is not drawn
# Those that are drawn, where they were measured.
DRAWN = ("bf16", "e8m3", "e5m2", "e4m3", "e5m2_unscaled", "e4m3_unscaled", "coat", "params_bf16")


def draw(found: Conditions, folder: Path, arms: list[str] | None = None) -> Path:
    """Draws one group of runs; returns the file.

    Args:
        found: the runs.
        folder: for the picture.
        arms: what to draw; by default those of DRAWN, or the first ones.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [arm for arm in arms or DRAWN if arm in found.arms] or list(verdicts(found))
    shown = shown[:MOST]
    path = folder / f"stability_{found.name}.png"
    with plt.rc_context(records.CHART | {"axes.grid.axis": "both"}):
        panels = [_losses, _excess, _failures]
        if any(one.outcome == "diverged" for s in all_samples(found) for one in s.events):
            panels.append(_areas)
        figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4.8))
        for axis, panel in zip(axes, panels, strict=True):
            panel(axis, found, shown)
        figure.suptitle(
            f"Stability of training: {found.size}, {found.settings.title}, on {found.device}"
        )
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)
    return path


def draw_curves(found: Conditions, folder: Path) -> Path:
    """Draws the final loss of every arm over the learning rate; returns the file.

    The baseline is in each panel. Losses far above that of byte frequencies are cut off.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = [arm for arm in verdicts(found) if arm != BASELINE] or [BASELINE]
    columns = min(ACROSS, len(arms))
    rows = -(-len(arms) // columns)
    path = folder / f"stability_{found.name}_curves.png"
    with plt.rc_context(records.CHART | {"axes.grid.axis": "both"}):
        figure, grid = plt.subplots(
            rows, columns, figsize=(2.7 * columns, 2.5 * rows + 0.6),
            sharex=True, sharey=True, squeeze=False,
        )  # fmt: skip
        highest = _highest(found)
        for axes, arm in zip(grid.flat, arms, strict=False):
            _curve(axes, found.arms.get(BASELINE, {}), highest, records.INK, width=4)
            _curve(axes, found.arms[arm], highest, records.ACCENT, width=1.5)
            axes.axhline(found.ceiling, color=records.PALE, lw=1.2, ls="--")
            axes.set_xscale("log")
            axes.set_ylim(top=1.2 * found.ceiling)
            axes.set_title(arm, fontsize=9)
        for place in range(len(arms), grid.size):
            grid.flat[place].axis("off")
            grid.flat[place - columns].tick_params(labelbottom=True)
        figure.supxlabel("learning rate")
        figure.suptitle(
            f"Final loss, nats: {found.size}, {found.settings.title}; medians, and what 80 % of "
            f"the seeds lie between; dark: {BASELINE}; dashed: byte frequencies alone"
        )
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)
    return path


def _curve(
    axes: Any, samples: dict[float, Sample], highest: float, color: str, *, width: float
) -> None:
    """Medians over seeds, and what 80 % of them lie between."""
    if samples:
        median, low, high = _bands(samples, highest)
        axes.fill_between(list(samples), low, high, color=color, alpha=0.15, lw=0)
        axes.plot(list(samples), median, "o-", ms=2 + width, lw=width, color=color)


def _highest(found: Conditions) -> float:
    """The loss that is drawn for one above it, and for an infinite one."""
    return 1.5 * max(float(s.signals.loss[:, 0].mean()) for s in all_samples(found))


def _bands(samples: dict[float, Sample], highest: float) -> list[Float[np.ndarray, " n"]]:
    """Medians of final losses by learning rate, and the lower and upper ends of 80 % of them."""
    bands = [band([one.final for one in sample.events]) for sample in samples.values()]
    return [np.minimum(part, highest) for part in zip(*bands, strict=True)]


def _look(number: int, arm: str) -> dict[str, Any]:
    """The baseline in ink, COAT in the accent's colour."""
    if arm == BASELINE:
        return {"color": records.INK, "lw": 2.2, "zorder": 3}
    accent, *others = records.LINES
    return {"color": accent if arm == "coat" else others[number % len(others)], "lw": 1.5}


def _beside(rates: list[float], number: int, arms: int) -> list[float]:
    """Learning rates, moved a little so that no arm's intervals cover those of another."""
    return [rate * 1.05 ** (number - (arms - 1) / 2) for rate in rates]


def _losses(axes: Any, found: Conditions, arms: list[str]) -> None:
    """Medians over seeds, and what 80 % of those of the baseline are between."""
    highest = _highest(found)
    for number, arm in enumerate(arms):
        samples = found.arms[arm]
        median, low, high = _bands(samples, highest)
        axes.plot(list(samples), median, "o-", ms=4, label=arm, **_look(number, arm))
        if arm == BASELINE:
            axes.fill_between(list(samples), low, high, color=records.PALE, alpha=0.3, lw=0)
    axes.axhline(found.ceiling, color=records.PALE, lw=1.2, ls="--", label="byte frequencies")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_title(f"final loss, nats: medians; 80 % of {BASELINE}'s seeds")
    axes.legend(fontsize=8)


def _excess(axes: Any, found: Conditions, arms: list[str]) -> None:
    """Means over seeds, with their intervals."""
    for number, arm in enumerate(arms):
        means = above_baseline(found, arm) if arm != BASELINE else {}
        if means:
            axes.errorbar(
                _beside(list(means), number, len(arms)), [100 * one.mean for one in means.values()],
                yerr=[100 * one.half for one in means.values()], fmt="o", ms=4, elinewidth=1.2,
                **{**_look(number, arm), "lw": 0},
            )  # fmt: skip
    axes.axhline(0, color=records.INK, lw=1.2)
    axes.set_xscale("log")
    axes.set_ylim(-EXCESS, EXCESS)
    axes.set_xlabel("learning rate")
    axes.set_title(f"loss above the baseline's, up to {EXCESS} %, 95 % intervals")


def _failures(axes: Any, found: Conditions, arms: list[str]) -> None:
    """Shares with their intervals."""
    by_arm = verdicts(found)
    for number, arm in enumerate(arms):
        rates = by_arm[arm].by_rate
        share, low, high = (
            np.array([100 * getattr(one, part) for one in rates.values()])
            for part in ("share", "low", "high")
        )
        axes.errorbar(
            _beside(list(rates), number, len(arms)), share, yerr=(share - low, high - share),
            fmt="o-", ms=4, elinewidth=0.8, **_look(number, arm),
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(-3, 103)
    axes.set_xlabel("learning rate")
    axes.set_title("runs that fail, %, with 95 % intervals")


def _areas(axes: Any, found: Conditions, arms: list[str]) -> None:
    """How well each signal tells diverging runs of all arms from others, before they diverge."""
    del arms
    samples, every = all_samples(found), found.settings.every
    for signal, color in zip(SIGNALS, records.LINES, strict=False):
        areas = [area_of(samples, signal, every, before) for before in BEFORE]
        known = [(b, a) for b, a in zip(BEFORE, areas, strict=True) if a.pairs]
        if known:
            steps, areas = zip(*known, strict=True)
            axes.errorbar(
                steps, [a.mean for a in areas], yerr=[1.96 * a.error for a in areas], fmt="o-",
                ms=4, lw=1.5, color=color, capsize=2, label=signal.replace("_", " "),
            )  # fmt: skip
    axes.axhline(0.5, color=records.PALE, lw=1.2, ls="--")
    axes.set_xlim(max(BEFORE) + 2, min(BEFORE) - 2)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("steps before divergence")
    axes.set_title("area under the ROC curve, 95 % intervals")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="lower left")
