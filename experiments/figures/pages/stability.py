"""The figures of docs/stability.md: what was measured, and the definitions in the code."""

import functools

import numpy as np

from coat_jax.models import parameters_count
from experiments.figures.compare import Given, Page, Sentence, Table
from experiments.figures.measured.files import FOLDER, of
from experiments.figures.pages.reasons import ARITHMETIC, PUBLISHED, SETTING
from experiments.sharpness_cost import shares
from experiments.stability import events, prediction, results, statistics, train
from experiments.stability.arms import BASELINE, SIZES
from experiments.stability.prediction import Area, area_of, lead_of
from experiments.stability.results import Conditions
from experiments.stability.statistics import Paired, Rate
from experiments.stability.table import (
    SHORTLY,
    above_baseline,
    all_samples,
    arm_warning_rows,
    compared,
    failure_rows,
    loss_rows,
    paired_rows,
    points,
    verdicts,
    warning_rows,
)

FIRST = 64  # seeds of all arms, before more were added to two of them
BEST = 1e-3  # the learning rate with the lowest losses
HIGHEST = 0.3  # that at which runs with scales fail
EDGE = HIGHEST, 1.0  # between them runs of the larger model begin to fail
CHANCE = 0.05  # the p-value from which on a difference may be chance
DEMO = "metrics.jsonl of `make demo`, of an early version and of commit 400cfd4"
KINDS = {"falling": False, "constant": True}  # learning rates, and whether they are constant
SHOWN = 4  # learning rates whose losses are on the page


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
        if not _is_rate(name) or any(row[place] and row[place][:2] != "0/" for row in rows)
    ]
    return _as_code([[row[place] for place in shown] for row in (header, *rows)])


def larger_model() -> tuple[float, ...]:
    """Million parameters of the larger model, and its seeds; raises if some runs of a learning rate
    failed and others did not.
    """
    found = measured("12M")
    for arm in verdicts(found).values():
        for rate, failed in arm.by_rate.items():
            if failed.count != (failed.runs if rate >= EDGE[1] else 0):
                raise ValueError(f"Some of the larger model's runs at {rate} failed: say so.")
    (seeds,) = {len(sample.seeds) for arm in found.arms.values() for sample in arm.values()}
    return parameters_count(SIZES["12M"].model) / 1e6, seeds


def highest_of_the_larger() -> tuple[float]:
    """The upper end of the interval of BF16's failures at `HIGHEST`, in percent."""
    return (100 * verdicts(measured("12M"))[BASELINE].by_rate[HIGHEST].high,)


def failures_12m() -> list[list[str]]:
    """How often BF16 and COAT failed in the larger model, at every learning rate."""
    return _as_code(failure_rows(measured("12M")))


def losses_5m() -> list[list[str]]:
    """By how much each arm's loss is above the baseline's, at the lowest learning rates."""
    return _as_code([row[: 1 + SHOWN] for row in loss_rows(measured("5M"))])


def failures_at_constant_rates() -> list[list[str]]:
    """How many runs of each arm failed at each constant learning rate, and how."""
    header, *rows = failure_rows(measured("5M", constant=True))
    kept = [place for place, name in enumerate(header) if place == 0 or _is_rate(name)]
    shown = [[row[place] for place in kept] for row in (header, *rows)]
    ways = ["stuck", "diverged"]
    more = [[*ways, "difference"]]
    for arm, *_ in rows:
        counts = [str(count_at_constant_rates(way, arm)) for way in ways]
        more.append([*counts, points(compared(measured("5M", constant=True), arm))])
    return _as_code([[*cells, *others] for cells, others in zip(shown, more, strict=True)])


def differences_5m() -> list[list[str]]:
    """How the failures of each arm differ from the baseline's."""
    return _as_code(paired_rows(measured("5M"), HIGHEST))


def count_at_constant_rates(outcome: str, *arms: str) -> int:
    """How many runs ended in this way; of all arms if none are named."""
    found = measured("5M", constant=True).arms
    samples = [sample for arm in arms or found for sample in found[arm].values()]
    return sum(one.outcome == outcome for sample in samples for one in sample.events)


def warnings_of_both() -> list[list[str]]:
    """How well each signal tells runs that will diverge, and how early an alarm sounds."""
    return _of_both({kind: warning_rows(measured("5M", constant=c)) for kind, c in KINDS.items()})


def warnings_by_arm() -> list[list[str]]:
    """How well each signal tells the runs of each arm that will diverge."""
    return _of_both(
        {
            kind: _as_code(arm_warning_rows(measured("5M", constant=constant)))
            for kind, constant in KINDS.items()
        }
    )


def _of_both(tables: dict[str, list[list[str]]]) -> list[list[str]]:
    """The rows of both kinds of learning rates, in one table."""
    (header, *_), *_ = tables.values()
    rows = [[kind, *row] for kind, (_, *body) in tables.items() for row in body]
    return [["learning rate", *header], *rows]


def _is_rate(name: str) -> bool:
    return name.replace(".", "").isdigit()


def _as_code(rows: list[list[str]]) -> list[list[str]]:
    return [rows[0], *([f"`{arm}`", *cells] for arm, *cells in rows[1:])]


def failed(arm: str, *, constant: bool = False) -> Rate:
    """The runs of an arm that failed, over all learning rates."""
    return verdicts(measured("5M", constant=constant))[arm].failed


def fewest_seeds() -> tuple[int]:
    """The seeds of the arm and learning rate, of those that all arms have, that has the fewest."""
    arms = measured("5M").arms.values()
    shared = set[float].intersection(*map(set, arms))
    return (min(len(arm[rate].seeds) for arm in arms for rate in shared),)


def seeds_of_e8m3_below() -> tuple[int]:
    """The seeds of E8M3 at the lowest learning rates."""
    (found,) = {len(s.seeds) for rate, s in measured("5M").arms["e8m3"].items() if rate < BEST}
    return (found,)


def best_rate() -> tuple[float]:
    """The learning rate with the lowest median loss, the same in all arms with scales."""
    by_arm = {
        arm: {rate: float(np.median([e.final for e in one.events])) for rate, one in rates.items()}
        for arm, rates in measured("5M").arms.items()
        if not arm.endswith("_unscaled")
    }
    best = {min(losses, key=losses.__getitem__) for losses in by_arm.values()}
    if best != {BEST}:
        raise ValueError(f"The best learning rates are {sorted(best)}: docs/stability.md says one.")
    return (BEST,)


def most_seeds() -> tuple[int]:
    """The seeds of BF16 and COAT at the highest learning rate."""
    (found,) = {len(measured("5M").arms[arm][HIGHEST].seeds) for arm in (BASELINE, "coat")}
    return (found,)


def difference(arm: str, *, rate: float | None = None, constant: bool = False) -> Paired:
    """How an arm's failures differ from the baseline's; at all learning rates if none is named."""
    found = compared(measured("5M", constant=constant), arm, rate)
    if found is None:
        raise ValueError(f"{arm} and {BASELINE} have no run in common: measure the same seeds.")
    return found


def chance(one: Paired) -> Paired:
    """A difference that the pages describe as one that may be chance."""
    if one.p < CHANCE:
        raise ValueError(
            f"A difference with p = {one.p:.2g} is below {CHANCE}, so it is hardly chance. Say so "
            "in docs/stability.md and README.md, and declare the new sentences without `chance`."
        )
    return one


def counts(one: Paired) -> tuple[int, ...]:
    """The failures of the arm and of the baseline, each with the number of pairs."""
    own, base = one.both + one.only_own, one.both + one.only_base
    return own, one.pairs, base, one.pairs


def in_points(one: Paired) -> tuple[float, ...]:
    """A difference and its interval, in percentage points."""
    return 100 * one.difference, 100 * one.low, 100 * one.high


def most_with_scales() -> tuple[float]:
    """The highest end of the intervals of all arms with scales, in percentage points."""
    arms = verdicts(measured("5M")).items()
    scaled = [one for arm, one in arms if not arm.endswith("_unscaled")]
    return (max(100 * chance(one.paired._replace(p=one.p)).high for one in scaled if one.paired),)


def areas(signal: str, before: int, *, constant: bool) -> Area:
    """How well a signal tells runs that will diverge, over all arms."""
    found = measured("5M", constant=constant)
    return area_of(all_samples(found), signal, found.settings.every, before)


def most_warned() -> tuple[float]:
    """The largest share of divergences before which an alarm sounds, in percent."""
    found = [measured("5M", constant=constant) for constant in KINDS.values()]
    leads = [
        lead_of(all_samples(one), signal, one.settings.every)
        for one in found
        for signal in prediction.SIGNALS
    ]
    if any(lead.median > 0 for lead in leads):
        raise ValueError("An alarm has a median lead above 0 steps: say so in docs/stability.md.")
    return (100 * max(lead.warned for lead in leads),)


def divergences(*arms: str, constant: bool) -> list[int]:
    """The steps of all divergences; of all arms if none are named."""
    found = measured("5M", constant=constant).arms
    samples = [sample for arm in arms or found for sample in found[arm].values()]
    return [one.onset for sample in samples for one in sample.events if one.onset is not None]


def late_with_scales() -> tuple[int, int]:
    """The divergences in BF16 and COAT dated to the first of the last steps; and all."""
    steps = divergences(BASELINE, "coat", constant=True)
    settings = measured("5M", constant=True).settings
    return steps.count(settings.steps - round(events.FINAL * settings.steps)), len(steps)


def failed_at_the_highest(arm: str) -> tuple[int, int]:
    """The runs of an arm that failed at `HIGHEST`; and all."""
    return verdicts(measured("5M"))[arm].by_rate[HIGHEST][:2]


def of_seeds_at_the_highest(first: int, end: int | None = None) -> tuple[int, int, int]:
    """How many of these seeds there are, and in how many COAT and BF16 failed at `HIGHEST`."""
    counts = []
    for arm in ("coat", BASELINE):
        sample = measured("5M").arms[arm][HIGHEST]
        by_seed = dict(zip(sample.seeds, sample.events, strict=True))
        events_of = [by_seed[seed] for seed in sorted(by_seed)[first:end]]
        counts.append(sum(one.outcome != "trained" for one in events_of))
    return len(events_of), *counts


def spiked_without_scales() -> tuple[int, int]:
    """The runs in E4M3 without scales, at constant learning rates, that had a spike; and all."""
    one = verdicts(measured("5M", constant=True))["e4m3_unscaled"]
    return one.spiked[:2]


def at_the_best(*arms: str, size: str = "5M") -> tuple[float, ...]:
    """The loss above the baseline's at `BEST`, and half of its interval, in percent."""
    means = [above_baseline(measured(size), arm)[BEST] for arm in arms]
    return tuple(100 * part for mean in means for part in (mean.mean, mean.half))


def without_scales() -> tuple[float]:
    """The least loss above the baseline's at the lowest rate, to ten percent."""
    least = min(at_the_best("e4m3_unscaled")[0], at_the_best("e5m2_unscaled")[0])
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
        Sentence("from {:.0f} seeds at each of six", fewest_seeds),
        Given("learning rates from 0.001 to 0.3", SETTING),
        Sentence("from {:.0f} seeds at the learning rates", most_seeds),
        Given("the learning rates 0.1 and 0.3.", SETTING),
        Sentence("(from {:.0f} seeds) E8M3", seeds_of_e8m3_below),
        Given("also ran at 0.0001 and 0.0003", SETTING),
        Given("picked the largest of 24 shares", ARITHMETIC),
        Sentence("the best learning rate, {:.3f}", best_rate),
        Sentence(
            "{:.0f} of {:.0f} runs failed in COAT and {:.0f} of {:.0f} in BF16, which is {:.1f} "
            "percentage points more, with a 95 % interval from {:+.1f} to {:+.1f}",
            lambda: (*counts(difference("coat")), *in_points(chance(difference("coat")))),
        ),
        Sentence(
            "are at the learning rate 0.3: there, {:.0f} of {:.0f} runs failed in COAT and {:.0f} "
            "of {:.0f} in BF16, which is {:+.1f} points, from {:+.1f} to {:+.1f}, with p = {:.3f}",
            lambda: (
                *counts(chance(difference("coat", rate=HIGHEST))),
                *in_points(difference("coat", rate=HIGHEST)),
                difference("coat", rate=HIGHEST).p,
            ),
        ),
        Sentence(
            "In the first {:d} seeds COAT failed in {:d} runs and BF16 in {:d}, which is why more "
            "seeds were added; in the other {:d} they failed in {:d} and in {:d}.",
            lambda: (*of_seeds_at_the_highest(0, FIRST), *of_seeds_at_the_highest(FIRST)),
        ),
        Sentence(
            "{:.0f} of {:.0f} runs failed in COAT and {:.0f} of {:.0f} in BF16: {:+.1f} points, "
            "from {:+.1f} to {:+.1f}",
            lambda: (
                *counts(chance(difference("coat", constant=True))),
                *in_points(difference("coat", constant=True)),
            ),
        ),
        Sentence(
            "{:.0f} of {:.0f} runs failed in E4M3 and {:.0f} of {:.0f} in E5M2",
            lambda: (*failed("e4m3_unscaled")[:2], *failed("e5m2_unscaled")[:2]),
        ),
        Sentence("the loss ends more than {:.0f} % higher", without_scales),
        Sentence("fails at most {:.1f} percentage points more often", most_with_scales),
        Sentence(
            "at 0.3, {:.0f} of {:.0f} runs failed in E8M5 and {:.0f} of {:.0f} in E5M2",
            lambda: (*failed_at_the_highest("e8m5"), *failed_at_the_highest("e5m2")),
        ),
        Sentence(
            "E8M4 ends {:+.2f} % ± {:.2f} above BF16, E8M3 {:+.2f} % ± {:.2f}, "
            "E4M3 {:+.2f} % ± {:.2f}, E5M2 {:+.2f} % ± {:.2f}, and COAT {:+.2f} % ± {:.2f}",
            lambda: at_the_best("e8m4", "e8m3", "e4m3", "e5m2", "coat"),
        ),
        Sentence(
            "E5M2 rises to {:+.2f} % ± {:.2f}, and that of E4M3 to {:+.2f} % ± {:.2f}",
            lambda: at_the_best("e5m2_head", "e4m3_head"),
        ),
        Sentence(
            "they end {:+.2f} % ± {:.2f} higher, rounded stochastically {:+.2f} % ± {:.2f}",
            lambda: at_the_best("params_bf16", "params_bf16_stochastic"),
        ),
        Sentence(
            "sounds in {:.0f} % of the runs that train sounded before at most {:.0f} % of the "
            "divergences",
            lambda: (100 * prediction.FALSE_ALARMS, *most_warned()),
        ),
        Sentence(
            "of {:.0f} divergences at learning rates that fall and {:.0f} at constant ones",
            lambda: tuple(len(divergences(constant=constant)) for constant in KINDS.values()),
        ),
        Given("The columns 0.1, 0.3", SETTING),
        Table("stability_5m", failures_5m),
        Given("The column for 0.3", SETTING),
        Table("stability_pairs_5m", differences_5m),
        Given("with its 95 % interval", SETTING),
        Table("stability_losses_5m", losses_5m),
        Sentence("every arm with scales, {:.3f} has the lowest losses", best_rate),
        Sentence("learns to a loss of {:.1f}", lambda: (learnt_without_scales(),)),
        Given("the gradient norm of one step was 13 in COAT and 3.4 in BF16", DEMO),
        Given("after the third step was 6.5 in COAT, at step 52, and 5.5 in BF16, at step 5", DEMO),
        Table("stability_constant", failures_at_constant_rates),
        Given("A share of 0.5 is chance", ARITHMETIC),
        Table("stability_warnings", warnings_of_both),
        Sentence(
            "{:.0f} steps before a divergence it is above that of a run that trains in a share of "
            "{:.2f} ± {:.2f} of all pairs",
            lambda: (SHORTLY, *areas("gradient_norm", SHORTLY, constant=False)[:2]),
        ),
        Sentence(
            "It is {:.2f} ± {:.2f} at {:.0f} steps before, and {:.2f} ± {:.2f} at constant",
            lambda: (
                *areas("gradient_norm", 2 * SHORTLY, constant=False)[:2],
                2 * SHORTLY,
                *areas("gradient_norm", SHORTLY, constant=True)[:2],
            ),
        ),
        Sentence("The same shares {:.0f} steps before", lambda: (SHORTLY,)),
        Table("stability_warnings_by_arm", warnings_by_arm),
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
        Sentence("stored at every {:.0f}th step", lambda: (measured("5M").settings.every,)),
        Sentence(
            "{:.0f} of the {:.0f} divergences at learning rates that fall are of E5M2 without "
            "scales",
            lambda: (
                len(divergences("e5m2_unscaled", constant=False)),
                len(divergences(constant=False)),
            ),
        ),
        Sentence(
            "{:.0f} runs of E4M3 without scales trained and {:.0f} diverged",
            lambda: tuple(
                count_at_constant_rates(way, "e4m3_unscaled") for way in ("trained", "diverged")
            ),
        ),
        Sentence("{:.0f} of the {:.0f} divergences in BF16 and COAT", late_with_scales),
        Sentence(
            "A Llama of {:.1f} million parameters was trained in BF16 and in COAT from {:.0f} "
            "seeds",
            larger_model,
        ),
        Sentence(
            "no run failed up to {:.1f}, and every run failed from {:.0f} on.** So at {:.1f} each "
            "fails in at most {:.0f} % of runs, the upper end of its interval. Failures begin "
            "between {:.1f} and {:.0f} in both",
            lambda: (*EDGE, HIGHEST, *highest_of_the_larger(), *EDGE),
        ),
        Sentence(
            "These runs have more steps, {:.0f}, of twice as many",
            lambda: (measured("12M").settings.steps,),
        ),
        Sentence(
            "At {:.3f} COAT ends {:+.2f} % ± {:.2f} above BF16, which is about",
            lambda: (BEST, *at_the_best("coat", size="12M")),
        ),
        Sentence("At {:.1f} million parameters only BF16", lambda: (larger_model()[0],)),
        Table("stability_12m", failures_12m),
        Sentence(
            "makes the gradients of `llama_124m` take {:.1f} % longer; a loop that has no logits "
            "yet needs another {:.1f} % for them",
            lambda: tuple(
                100 * shares(of("sharpness_cost"))[what] for what in ("sharpness", "logits")
            ),
        ),
        Given("arXiv 2309.14322", PUBLISHED),
        Given("arXiv 2501.00656", PUBLISHED),
        Given("arXiv 2405.18710", PUBLISHED),
    ],
)
