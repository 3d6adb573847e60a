"""The figures of docs/stability.md: what was measured, and the definitions in the code."""

import functools

from experiments.figures.compare import Given, Page, Sentence, Table
from experiments.figures.measured.files import FOLDER
from experiments.figures.pages.reasons import PUBLISHED, SETTING
from experiments.stability import events, prediction, results, statistics, train
from experiments.stability.arms import BASELINE
from experiments.stability.results import Conditions
from experiments.stability.statistics import Rate
from experiments.stability.table import above_baseline, failure_rows, loss_rows, verdicts

SLOWEST = 1e-3  # the learning rate with the lowest losses


@functools.cache
def measured(size: str) -> Conditions:
    """The runs of a size."""
    rows = results.read([FOLDER / results.FILE])
    (found,) = (one for one in results.conditions_of(rows) if one.size == size)
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
    """By how much each arm's loss is above the baseline's."""
    return _as_code(loss_rows(measured("5M")))


def _is_rate(name: str) -> bool:
    return name.replace(".", "").isdigit()


def _as_code(rows: list[list[str]]) -> list[list[str]]:
    return [rows[0], *([f"`{arm}`", *cells] for arm, *cells in rows[1:])]


def failed(arm: str) -> Rate:
    """The runs of an arm that failed, over all learning rates."""
    return verdicts(measured("5M"))[arm].failed


def at_the_slowest(arm: str) -> tuple[float, float]:
    """The loss above the baseline's at the lowest rate, and half of its interval, in percent."""
    mean = above_baseline(measured("5M"), arm)[SLOWEST]
    return 100 * mean.mean, 100 * mean.half


def percent(share: float) -> tuple[float]:
    """As the values of a sentence."""
    return (100 * share,)


PAGE = Page(
    "docs/stability.md",
    [
        Given("learning rates from 0.001 to 0.3", SETTING),
        Given("The columns 0.1 and 0.3", SETTING),
        Sentence(
            "{:.0f} of {:.0f} runs failed in COAT and {:.0f} of {:.0f} in BF16",
            lambda: (*failed("coat")[:2], *failed(BASELINE)[:2]),
        ),
        Table("stability_5m", failures_5m),
        Given("with its 95 % interval", SETTING),
        Table("stability_losses_5m", losses_5m),
        Sentence(
            "COAT ends {:+.2f} % ± {:.2f} above BF16, and E5M2 for all operands {:+.2f} % ± {:.2f}",
            lambda: at_the_slowest("coat") + at_the_slowest("e5m2"),
        ),
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
