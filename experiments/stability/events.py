"""What counts as diverged and stuck. Fixed before the runs.

    ceiling     the entropy of single bytes of the text: the loss of a model that knows only how
                frequent each byte is, and of runs that lose what they had learnt
    smooth      the loss, by a running median over 5 % of the steps
    error       the standard error of such a median, from the spread of the loss around it
    best        the least smooth loss of a run;  ceiling - best is what it had learnt
    final       the median loss of the last 10 % of the steps

    stuck       best + 3 errors > 0.95 ceiling: at no time surely better than byte frequencies
    limit       best + (ceiling - best) / 2, but at least best + 6 errors: half of what was learnt
                is lost, and that is not mere noise
    diverged    not stuck, and final > limit
    onset       of a diverged run: the first step after which the smooth loss stays above the limit,
                at the latest the first of the last 10 %
    trained     neither stuck nor diverged
    failed      stuck or diverged

A loss that is not finite counts as infinite. Medians are used, and standard deviations from median
absolute deviations, so that no single outlier decides. Errors are needed because the least of many
noisy medians is low by about three of them: without them, small batches look like divergence.

Others: Wortsman et al. (arXiv 2309.14322) call no run diverged, and replace final losses above the
first by the first.
"""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

Outcome = Literal["trained", "diverged", "stuck"]

SMOOTH, FINAL = 0.05, 0.1  # shares of a run
LEAST_SMOOTH = 9  # steps
STUCK, LOST = 0.95, 0.5
SURE, SURE_OF_BEST = 6.0, 3.0  # errors
OF_NORMAL = 1.4826  # standard deviation over median absolute deviation
OF_MEDIAN = 1.2533  # standard error of a median over that of a mean


class Events(NamedTuple):
    """What happened in a run.

    Attributes:
        outcome: see above.
        final: the final loss.
        onset: of a divergence, else None.
    """

    outcome: Outcome
    final: float
    onset: int | None


def entropy(text: UInt8[np.ndarray, " N"]) -> float:
    """The ceiling, in nats: of single bytes."""
    counts = np.bincount(text, minlength=256)
    p = counts[counts > 0] / counts.sum()
    return float(-np.sum(p * np.log(p)))


def events_of(losses: Float[np.ndarray, " T"], ceiling: float) -> Events:
    """What happened in a run.

    Args:
        losses: of every step.
        ceiling: the loss without learning, from `entropy`.
    """
    losses = np.where(np.isfinite(losses), losses, np.inf).astype(np.float64)
    final = final_loss(losses)
    width = max(round(SMOOTH * len(losses)), LEAST_SMOOTH)
    smooth = running_median(losses, width)
    best, error = float(smooth.min()), _error(losses, smooth, width)
    if best + SURE_OF_BEST * error > STUCK * ceiling:
        return Events("stuck", final, None)
    limit = best + max(LOST * (ceiling - best), SURE * error)
    if final <= limit:
        return Events("trained", final, None)
    below = np.flatnonzero(smooth <= limit)
    onset = min(int(below[-1]) + 1, len(losses) - _last(losses))
    return Events("diverged", final, onset)


def _error(losses: Float[np.ndarray, " T"], smooth: Float[np.ndarray, " T"], width: int) -> float:
    """The standard error of the smooth loss, where both are finite."""
    finite = np.isfinite(losses) & np.isfinite(smooth)
    if not finite.any():
        return np.inf
    spread = OF_NORMAL * float(np.median(np.abs(losses[finite] - smooth[finite])))
    return OF_MEDIAN * spread / float(np.sqrt(width))


def final_loss(losses: Float[np.ndarray, " T"]) -> float:
    """The median of the last steps; infinite if most of them are not finite."""
    last = losses[-_last(losses) :]
    return float(np.median(np.where(np.isfinite(last), last, np.inf)))


def _last(losses: Float[np.ndarray, " T"]) -> int:
    """How many steps the final loss is of."""
    return max(round(FINAL * len(losses)), 1)


def running_median(values: Float[np.ndarray, " T"], width: int) -> Float[np.ndarray, " T"]:
    """The median around each step, over `width` steps rounded up to an odd number.

    At the ends it is over the steps that there are.
    """
    half = width // 2
    padded = np.pad(values, half, constant_values=np.nan)
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    return np.nanmedian(around, axis=1)
