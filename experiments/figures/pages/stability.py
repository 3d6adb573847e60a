"""The figures of docs/stability.md: what was measured, and the definitions in the code."""

import functools

import numpy as np

from experiments.figures.compare import Given, Page, Sentence, Table
from experiments.figures.measured.files import FOLDER
from experiments.figures.pages.reasons import ARITHMETIC, PUBLISHED, SETTING
from experiments.stability import events, prediction, results, statistics, train
from experiments.stability.arms import BASELINE
from experiments.stability.results import Conditions
from experiments.stability.statistics import Rate
from experiments.stability.table import (
    above_baseline,
    failure_rows,
    loss_rows,
    verdicts,
    warning_rows,
)

SLOWEST = 1e-3  # the learning rate with the lowest losses
SHOWN = 3  # learning rates whose losses are on the page


@functools.cache
def measured(size: str, *, constant: bool = False) -> Conditions:
    """The runs of a size, whose learning rate falls to zero or stays constant."""
    rows = results.read([FOLDER / results.FILE])
    ratio = 1.0 if constant else 0.0
    (found,) = (
        one
        for one in results.conditions_of(rows)
        if (one.size, one.settings.final_ratio) == (size, ratio)
    )
    return found


def failures_5m() -> list[list[str]]:
    """How often each arm failed; without the learning rates at which none did."""
    header, *rows = failure_rows(measured("5M"))
    shown = [
        place
        for place, name in enumerate(header)
        if not _is_rate(name) or any(not row[place].startswith("0/") for row in rows)
    ]
    return _as_code([[row[place] for place in shown] for row in (header, *rows)])


def losses_5m() -> list[list[str]]:
    """By how much each arm's loss is above the baseline's, at the lowest learning rates."""
    return _as_code([row[: 1 + SHOWN] for row in loss_rows(measured("5M"))])


def failures_at_constant_rates() -> list[list[str]]:
    """How many runs of each arm failed at each constant learning rate, and how."""
    header, *rows = failure_rows(measured("5M", constant=True))
    kept = [place for place, name in enumerate(header) if place == 0 or _is_rate(name)]
    shown = [[row[place] for place in kept] for row in (header, *rows)]
    ways = ["stuck", "diverged"]
    counts = [[str(count_at_constant_rates(way, arm)) for way in ways] for arm, *_ in rows]
    return _as_code([[*cells, *more] for cells, more in zip(shown, [ways, *counts], strict=True)])


def count_at_constant_rates(outcome: str, *arms: str) -> int:
    """How many runs ended in this way; of all arms if none are named."""
    found = measured("5M", constant=True).arms
    samples = [sample for arm in arms or found for sample in found[arm].values()]
    return sum(one.outcome == outcome for sample in samples for one in sample.events)


def warnings_at_constant_rates() -> list[list[str]]:
    """How well each signal tells runs that will diverge, and how early an alarm sounds."""
    return warning_rows(measured("5M", constant=True))


def _is_rate(name: str) -> bool:
    return name.replace(".", "").isdigit()


def _as_code(rows: list[list[str]]) -> list[list[str]]:
    return [rows[0], *([f"`{arm}`", *cells] for arm, *cells in rows[1:])]


def failed(arm: str, *, constant: bool = False) -> Rate:
    """The runs of an arm that failed, over all learning rates."""
    return verdicts(measured("5M", constant=constant))[arm].failed


def spiked_without_scales() -> tuple[int, int]:
    """The runs in E4M3 without scales, at constant learning rates, that had a spike; and all."""
    one = verdicts(measured("5M", constant=True))["e4m3_unscaled"]
    return one.spiked[:2]


def at_the_slowest(*arms: str) -> tuple[float, ...]:
    """The loss above the baseline's at the lowest rate, and half of its interval, in percent."""
    means = [above_baseline(measured("5M"), arm)[SLOWEST] for arm in arms]
    return tuple(100 * part for mean in means for part in (mean.mean, mean.half))


def without_scales() -> tuple[float]:
    """The least loss above the baseline's at the lowest rate, to ten percent."""
    least = min(at_the_slowest("e4m3_unscaled")[0], at_the_slowest("e5m2_unscaled")[0])
    return (least // 10 * 10,)


def learnt_without_scales() -> float:
    """The lowest loss of E4M3 without scales at the lowest constant rate, the median of runs."""
    samples = measured("5M", constant=True).arms["e4m3_unscaled"]
    return float(np.median(samples[min(samples)].signals.loss.min(axis=1)))


def percent(share: float) -> tuple[float]:
    """As the values of a sentence."""
    return (100 * share,)


PAGE = Page(
    "docs/stability.md",
    [
        Given("learning rates from 0.001 to 0.3", SETTING),
        Sentence(
            "{:.0f} of {:.0f} runs failed in COAT and {:.0f} of {:.0f} in BF16",
            lambda: (*failed("coat")[:2], *failed(BASELINE)[:2]),
        ),
        Sentence(
            "it is {:.0f} of {:.0f} in COAT and {:.0f} of {:.0f} in BF16",
            lambda: (*failed("coat", constant=True)[:2], *failed(BASELINE, constant=True)[:2]),
        ),
        Sentence(
            "{:.0f} of {:.0f} runs failed in E4M3 and {:.0f} of {:.0f} in E5M2",
            lambda: (*failed("e4m3_unscaled")[:2], *failed("e5m2_unscaled")[:2]),
        ),
        Sentence("the loss ends more than {:.0f} % higher", without_scales),
        Sentence(
            "E8M4 ends {:+.2f} % ± {:.2f} above BF16, E8M3 {:+.2f} % ± {:.2f}, "
            "E4M3 {:+.2f} % ± {:.2f}, E5M2 {:+.2f} % ± {:.2f}, and COAT {:+.2f} % ± {:.2f}",
            lambda: at_the_slowest("e8m4", "e8m3", "e4m3", "e5m2", "coat"),
        ),
        Sentence(
            "E5M2 rises to {:+.2f} % ± {:.2f}, and that of E4M3 to {:+.2f} % ± {:.2f}",
            lambda: at_the_slowest("e5m2_head", "e4m3_head"),
        ),
        Sentence(
            "they end {:+.2f} % ± {:.2f} higher, rounded stochastically {:+.2f} % ± {:.2f}",
            lambda: at_the_slowest("params_bf16", "params_bf16_stochastic"),
        ),
        Sentence("of {:.0f} runs that diverged", lambda: (count_at_constant_rates("diverged"),)),
        Given("The columns 0.1, 0.3", SETTING),
        Table("stability_5m", failures_5m),
        Given("with its 95 % interval", SETTING),
        Table("stability_losses_5m", losses_5m),
        Sentence("learns to a loss of {:.1f}", lambda: (learnt_without_scales(),)),
        Table("stability_constant", failures_at_constant_rates),
        Given("A share of 0.5 is chance", ARITHMETIC),
        Table("stability_warnings", warnings_at_constant_rates),
        Sentence("{:.0f} of {:.0f} runs in E4M3 without scales had one", spiked_without_scales),
        Sentence("median over {:.0f} % of its steps", lambda: percent(events.SMOOTH)),
        Sentence("loss of the last {:.0f} % of the steps", lambda: percent(events.FINAL)),
        Sentence(
            "best is less than {:.0f} errors below {:.0f} % of the ceiling",
            lambda: (events.SURE_OF_BEST, 100 * events.STUCK),
        ),
        Sentence("and by more than {:.0f} errors", lambda: (events.SURE,)),
        Sentence(
            "median of the {:.0f} before it by more than {:.0f} of their standard deviations",
            lambda: (events.PAST, events.DEVIATIONS),
        ),
        Sentence("more than {:.0f} % of the decrease since", lambda: percent(events.HEIGHT)),
        Sentence("AdamW with b2 = {:.2f}", lambda: (train.B2,)),
        Sentence("have Wilson's {:.0f} % intervals", lambda: percent(statistics.LEVEL)),
        Sentence(
            "last {:.0f} points by a factor that at most {:.0f} % of the runs that train ever "
            "reach",
            lambda: (prediction.PAST, 100 * prediction.FALSE_ALARMS),
        ),
        Given("arXiv 2309.14322", PUBLISHED),
        Given("arXiv 2501.00656", PUBLISHED),
        Given("arXiv 2405.18710", PUBLISHED),
    ],
)
