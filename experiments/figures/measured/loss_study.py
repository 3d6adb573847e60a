"""What each part of FP8 costs in loss: loss_study."""

import functools
import math
from dataclasses import replace

from experiments.figures.measured.files import FOLDER
from experiments.loss_study import results, statistics
from experiments.loss_study.arms import SIZES
from experiments.loss_study.measure import PREPARING, STARTING
from experiments.loss_study.statistics import Comparison, Effect, Row

# Size of the model, learning rate and steps of the runs that the pages quote.
STUDY = "40M", 5e-4, 400
LONGER = "40M", 5e-4, 2400
LARGER = "124M", 6e-4, 600
LARGEST = "350M", 3e-4, 300
STANDARD = "124M", 6e-4, 2250  # those that the aim is about


@functools.cache
def runs(size: str, learning_rate: float, steps: int, *, muon: bool = False) -> list[Row]:
    """The runs of one model size, learning rate and length, with AdamW or Muon."""
    rows = results.read([FOLDER / "loss_study.json"])
    (found,) = (
        group
        for group in results.conditions_of(rows).values()
        if group[0]["size"] == size
        and group[0]["settings"]["learning_rate"] == learning_rate
        and group[0]["settings"]["steps"] == steps
        and not group[0]["definition"]["optimizer"]
        and results.trains_by_muon(group[0]) == muon
    )
    return found


@functools.cache
def effects(
    size: str,
    learning_rate: float,
    steps: int,
    *,
    muon: bool = False,
    held_out: str | None = None,
) -> Comparison:
    """What each arm costs in training loss, relative to the baselines, or in held-out loss.

    `held_out` is the precision of that evaluation: see `statistics.held_out`.
    """
    rows = runs(size, learning_rate, steps, muon=muon)
    baselines = results.baselines_of(rows)
    if held_out is None:
        return statistics.compare(rows, baselines)
    return statistics.compare(rows, baselines, statistics.held_out(held_out))


def percent(effect: Effect, digits: int = 2) -> tuple[float, float]:
    """Its mean, never -0.00, and half of its interval, in percent."""
    return round(100 * effect.mean, digits) + 0.0, 100 * effect.half


def cell(effect: Effect, digits: int = 2) -> str:
    """An effect as the tables show it; that of a single seed has no interval."""
    mean, half = percent(effect, digits)
    interval = "" if math.isnan(half) else f" ± {half:.{digits}f}"
    return f"{mean:+.{digits}f} %{interval}"


def cost(arm: str, *, muon: bool = False, held_out: str | None = None) -> tuple[float, float]:
    """What an arm costs in training or held-out loss, and half of its interval, in percent."""
    return percent(effects(*STUDY, muon=muon, held_out=held_out).effects[arm])


def below(arm: str) -> tuple[float, float]:
    """How far an arm ends below the baselines, and half of its interval, in percent."""
    mean, half = cost(arm)
    return -mean, half


def range_of(arm: str) -> tuple[float, float]:
    """The least and the most that one seed of an arm costs in training loss, in percent."""
    by_seed = statistics.above(runs(*STUDY), _baselines())[arm]
    gaps = [100 * sum(of_seed) / len(of_seed) for of_seed in by_seed.values()]
    return min(gaps), max(gaps)


def seeds(arm: str) -> int:
    """How many seeds of an arm were trained."""
    return effects(*STUDY).effects[arm].seeds


def minutes(size: str, *, steps: int, runs: int) -> float:
    """How long some runs take on one H200, with their text, by the study's own estimate."""
    settings = replace(SIZES[size].settings, steps=steps)
    return estimated_minutes(size, runs * settings.tokens)


def estimated_minutes(size: str, tokens: float) -> float:
    """How long a call takes that trains on so many tokens; see `measure.plan`."""
    return (PREPARING + STARTING + tokens / SIZES[size].tokens_per_second) / 60


def extremes() -> tuple[float, float]:
    """How far single runs end below and above the baselines of their seed, in percent."""
    by_arm = statistics.above(runs(*STUDY), _baselines()).values()
    gaps = [100 * gap for by_seed in by_arm for of_seed in by_seed.values() for gap in of_seed]
    return -min(gaps), max(gaps)


def cost_by(
    step: int, arm: str = "coat", of: tuple[str, float, int] = STUDY, *, muon: bool = False
) -> float:
    """What an arm costs in the twentieth of its run that ends at a step, in percent."""
    steps = of[-1] // 20

    def before(row: Row) -> float:
        losses = row["losses"][step - steps : step]
        return float(sum(losses) / len(losses))

    rows = runs(*of, muon=muon)
    found = statistics.compare(rows, results.baselines_of(rows), before).effects[arm]
    return percent(found)[0]


def shaken() -> tuple[float, float, float]:
    """How many BF16 runs began from parameters changed by 1 %, and their gaps in percent.

    Returns:
        How many there are, the mean of their gaps, and the largest one.
    """
    gaps = statistics.above(runs(*STUDY), _baselines())
    found = [
        gap
        for arm in ("bf16_shaken", "bf16_shaken_again")
        for of_seed in gaps[arm].values()
        for gap in of_seed
    ]
    return len(found), 100 * sum(found) / len(found), 100 * max(map(abs, found))


def _baselines() -> set[str]:
    return results.baselines_of(runs(*STUDY))


def floor() -> float:
    """The standard deviation between two baselines of one seed, in percent."""
    return 100 * effects(*STUDY).noise.apart


def band() -> float:
    """The largest mean over four seeds that rounding alone explains, in percent."""
    comparison = effects(*STUDY)
    return 100 * comparison.noise.band(4, comparison.baselines)


def cost_above(other: str, arm: str, *, muon: bool = False) -> tuple[float, float, float]:
    """By how much an arm ends above another one, half of the interval, and over how many seeds."""
    effect = statistics.compare(runs(*STUDY, muon=muon), [other]).effects[arm]
    return *percent(effect), effect.seeds


def cost_of_evaluating_rounded() -> float:
    """How much held-out loss a rounded forward pass adds to networks that were trained without."""
    rounded, exact = statistics.held_out("coat"), statistics.held_out("own")
    networks = [row for row in runs(*STUDY) if row["arm"] == "activations_nearest"]
    gaps = [math.log(rounded(row) / exact(row)) for row in networks]
    return 100 * sum(gaps) / len(gaps)


def cost_of_longer_runs() -> tuple[float, ...]:
    """What COAT costs in training loss, and in the held-out loss of its weights in BF16."""
    found = (effects(*LONGER, held_out=held).effects["coat"] for held in (None, "bf16"))
    return tuple(number for effect in found for number in percent(effect))


def floor_of_longer_runs_with_muon() -> float:
    """The standard deviation between two baselines of one seed, in percent."""
    return 100 * effects(*LONGER, muon=True).noise.apart


def repeated_longer_runs_with_muon() -> float:
    """How far two 8-bit runs of one arm and seed end apart at most, held out and in percent."""
    rows = runs(*LONGER, muon=True)
    baselines = results.baselines_of(rows)
    gaps = statistics.above(rows, baselines, statistics.held_out("own"))
    in_8_bits = (gaps[arm].values() for arm in gaps.keys() - baselines)
    return max(100 * (max(of_seed) - min(of_seed)) for by_seed in in_8_bits for of_seed in by_seed)


def cost_of_muon_by_seed(size: str, learning_rate: float, steps: int) -> tuple[float, ...]:
    """What `fp8_muon` costs in training loss with each seed, in percent, never -0.00."""
    rows = runs(size, learning_rate, steps, muon=True)
    by_seed = statistics.above(rows, results.baselines_of(rows))["fp8_muon"]
    means = (100 * sum(by_seed[seed]) / len(by_seed[seed]) for seed in sorted(by_seed))
    return tuple(round(mean, 2) + 0.0 for mean in means)


def cost_of_muon_in_longer_runs() -> tuple[float, ...]:
    """What `fp8_muon` costs in training loss over more tokens, with half of its interval."""
    return tuple(percent(effects(*LONGER, muon=True).effects["fp8_muon"]))


def cost_of_forward(size: str, learning_rate: float, steps: int) -> float:
    """How much the forward pass of COAT adds to the held-out loss of its weights, in percent."""
    own, bf16 = statistics.held_out("own"), statistics.held_out("bf16")
    trained = [row for row in runs(size, learning_rate, steps) if row["arm"] == "coat"]
    return 100 * sum(math.log(own(row) / bf16(row)) for row in trained) / len(trained)


def cost_of_muon() -> tuple[float, ...]:
    """What `fp8_muon` costs in training and held-out loss, with half of each interval."""
    found = (cost("fp8_muon", muon=True, held_out=held) for held in (None, "own"))
    return tuple(number for one in found for number in one)


def cost_of_muon_before() -> tuple[float, float]:
    """What `fp8_muon` cost in training loss before it divided the columns of the momentum."""
    by_arm = effects(*STUDY, muon=True).effects
    (before,) = (effect for arm, effect in by_arm.items() if arm.startswith("fp8_muon@"))
    return percent(before)


@functools.cache
def _larger() -> tuple[list[Row], set[str]]:
    """The runs of the larger model, whatever code trained them, and which arms are baselines."""
    rows = [row | {"arm": row["arm"].partition("@")[0]} for row in runs(*LARGER)]
    return rows, results.baselines_of(rows)


def larger(arm: str) -> tuple[float, float]:
    """What an arm costs the larger model, and half of its interval over seeds, in percent."""
    return percent(statistics.compare(*_larger()).effects[arm])


def larger_seeds() -> list[list[str]]:
    """What each seed of the larger model says alone."""
    rows, baselines = _larger()
    gaps = statistics.above(rows, baselines)
    arms = {
        "COAT": "coat",
        "rounded to nearest": "coat_nearest",
        "to nearest, first quarter in BF16": "coat_after_bf16_nearest",
    }
    table = [["seed", "between two BF16 runs", *arms]]
    for seed in sorted(gaps["coat_nearest"]):
        base, other = (100 * gaps[arm][seed][0] for arm in ("bf16", "bf16_ulp"))
        costs = (f"{100 * gaps[arm][seed][0]:+.2f} %" for arm in arms.values())
        table.append([str(seed), f"{abs(base - other):.2f} %", *costs])
    return table


def larger_apart() -> tuple[float]:
    """How far the two baselines of one seed of the larger model end apart at most, in percent."""
    rows, baselines = _larger()
    gaps = statistics.above(rows, baselines)
    base, other = (gaps[arm] for arm in sorted(baselines))
    return (100 * max(abs(base[seed][0] - other[seed][0]) for seed in base),)


def saved_by_int8(size: str, learning_rate: float, steps: int) -> tuple[float, float]:
    """By how much COAT_INT8 ends below COAT with Muon, and half of the interval, in percent."""
    rows = runs(size, learning_rate, steps, muon=True)
    return percent(statistics.compare(rows, ["muon_coat_int8"]).effects["muon_coat"])


def with_muon(
    size: str, learning_rate: float, steps: int, *, held_out: str | None = None
) -> tuple[float, ...]:
    """What COAT and COAT_INT8 cost with Muon, in percent, and over how many seeds.

    Each cost has half of its interval after it.
    """
    found = effects(size, learning_rate, steps, muon=True, held_out=held_out).effects
    return *_percents(found, "muon_coat", "muon_coat_int8"), found["muon_coat"].seeds


def above(baseline: str, arm: str) -> tuple[float, float]:
    """By how much an arm ends above another one in the same seeds of the runs that the aim is
    about, and half of the interval, in percent.
    """
    rows = runs(*STANDARD, muon=True)
    return percent(statistics.compare(rows, [baseline]).effects[arm])


def in_standard_run(*arms: str, held_out: str | None = None) -> list[float]:
    """What arms cost in the runs that the aim is about, and half of each interval, in percent."""
    found = effects(*STANDARD, muon=True, held_out=held_out).effects
    return _percents(found, *arms)


def of_evaluation(*arms: str) -> list[float]:
    """By how much evaluating an arm's weights in its own precision and not in BF16 raises the
    held-out loss of the runs that the aim is about, and half of the interval, in percent.
    """
    rows = runs(*STANDARD, muon=True)
    own, bf16 = (statistics.held_out(forward) for forward in ("own", "bf16"))
    found = statistics.compare(rows, results.baselines_of(rows), lambda row: own(row) / bf16(row))
    return _percents(found.effects, *arms)


def _percents(found: dict[str, Effect], *arms: str) -> list[float]:
    return [figure for arm in arms for figure in percent(found[arm])]


def seconds_of_training(*arms: str) -> list[float]:
    """How long the runs that the aim is about trained, without compilation, the mean over seeds."""
    seconds = {arm: [] for arm in arms}
    for row in runs(*STANDARD, muon=True):
        if row["arm"] in seconds:
            seconds[row["arm"]].append(row["seconds"]["train"])
    return [sum(of_arm) / len(of_arm) for of_arm in seconds.values()]


def million_tokens(
    size: str, learning_rate: float, steps: int, *, muon: bool = False, by: int | None = None
) -> float:
    """How many each run reads by a step, or in all, in millions."""
    settings = runs(size, learning_rate, steps, muon=muon)[0]["settings"]
    read = settings["steps"] if by is None else by
    return read * settings["batch"] * settings["sequence"] / 1e6
