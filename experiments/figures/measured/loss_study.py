"""What parts of FP8 cost in loss, for pages that still need it."""

import math

from experiments.loss_study.statistics import Effect
from experiments.published.loss import effects


def percent(effect: Effect, digits: int = 2) -> tuple[float, float]:
    """Its mean, never -0.00, and half of its interval, in percent."""
    return round(100 * effect.mean, digits) + 0.0, 100 * effect.half


def cell(effect: Effect, digits: int = 2) -> str:
    """An effect as the tables show it; that of a single seed has no interval."""
    mean, half = percent(effect, digits)
    interval = "" if math.isnan(half) else f" ± {half:.{digits}f}"
    return f"{mean:+.{digits}f} %{interval}"


def cost(arm: str) -> tuple[float, float]:
    """What an arm costs in training loss, and half of its interval, in percent."""
    return percent(effects("adamw").effects[arm])


def below(arm: str) -> tuple[float, float]:
    """How far an arm ends below the baselines, and half of its interval, in percent."""
    mean, half = cost(arm)
    return -mean, half


def above(baseline: str, arm: str) -> tuple[float, float]:
    """By how much an arm ends above another one at 124 million parameters, in percent."""
    return percent(effects("124m_longer", above=baseline).effects[arm])
