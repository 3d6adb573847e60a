"""How often runs fail by format: stability.json."""

import functools

from experiments.published.results import FOLDER
from experiments.stability.arms import BASELINE
from experiments.stability.conditions import Conditions, conditions_of
from experiments.stability.failures import Rate
from experiments.stability.show import above_baseline, compared, points, verdicts
from experiments.stability.study import STUDY

BEST, HIGHEST = 1e-3, 0.3  # learning rates: with the lowest losses, and where runs fail
ARMS = {
    "bf16": "BF16",
    "e8m4": "E8M4",
    "e8m3": "E8M3",
    "e4m3": "E4M3",
    "e5m2": "E5M2",
    "e4m3_unscaled": "E4M3 without scales",
    "e5m2_unscaled": "E5M2 without scales",
    "fp8_linear": "`FP8_LINEAR`",
    "coat": "**`COAT`**",
    "coat_lean": "`COAT_LEAN`",
    "coat_rounded_forward": "`COAT_PAPER`",
    "moments": "8-bit moments alone",
    "saved": "activations saved in FP8 alone",
    "params_bf16": "BF16 parameters, to nearest",
    "params_bf16_stochastic": "BF16 parameters, stochastic",
}


@functools.cache
def measured(ratio: float = 0.0) -> Conditions:
    """The runs of 5 million parameters; `ratio` is the last learning rate to the highest."""
    (found,) = (
        one
        for one in conditions_of(STUDY.read([FOLDER / "stability.json"]))
        if (one.size, one.settings.final_ratio) == ("5M", ratio)
    )
    return found


def arms() -> list[list[str]]:
    """Failures and loss of each arm."""
    against = "failures against BF16, points", f"loss against BF16 at {BEST}, %"
    rows = [["precision", "failed", f"at {HIGHEST}", *against]]
    found = verdicts(measured())
    for arm, name in ARMS.items():
        verdict, loss = found[arm], above_baseline(measured(), arm)[BEST]
        counts = _count(verdict.failed), _count(verdict.by_rate[HIGHEST])
        change = f"{100 * loss.mean:+.2f} ± {100 * loss.half:.2f}" if arm != BASELINE else ""
        rows.append([name, *counts, points(verdict.paired), change])
    return rows


def more_failures(arm: str, part: str = "difference", ratio: str = "0") -> str:
    """By how many percentage points more of an arm's runs fail; or the interval's low or high."""
    return f"{100 * getattr(compared(measured(float(ratio)), arm), part):+.1f}"


def _count(rate: Rate) -> str:
    return f"{rate.count}/{rate.runs}"
