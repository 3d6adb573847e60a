"""What counts as diverged, stuck, spiked and recovered. Fixed before the runs.

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

    spike       a step whose loss is above the median of the `PAST` steps before it by more than
                7 of their standard deviations, and by more than 10 % of what training has brought
                so far, first loss - that median
    recovered   a step, and the median of 5 from there, are back within half the spike's least
                height of what was before. Until then, a spike is not over.

A loss that is not finite counts as infinite. Medians are used, and standard deviations from median
absolute deviations, so that no single outlier decides. Errors are needed because the least of many
noisy medians is low by about three of them: without them, small batches look like divergence.

Others: Wortsman et al. (arXiv 2309.14322) call no run diverged, and replace final losses above the
first by the first, as `statistics.sensitivity` does. OLMo 2 (arXiv 2501.00656) counts as a spike
what is 7 standard deviations off a running average of 1000 steps. Both means and standard
deviations grow with the spikes that they are to find, and these runs are shorter than 1000 steps.
"""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

Outcome = Literal["trained", "diverged", "stuck"]

SMOOTH, FINAL = 0.05, 0.1  # shares of a run
LEAST_SMOOTH = 9  # steps
STUCK, LOST = 0.95, 0.5
SURE, SURE_OF_BEST = 6.0, 3.0  # errors
PAST, DEVIATIONS, HEIGHT = 20, 7.0, 0.1
BACK = 5  # steps
OF_NORMAL = 1.4826  # standard deviation over median absolute deviation
OF_MEDIAN = 1.2533  # standard error of a median over that of a mean


class Spike(NamedTuple):
    """Where a spike begins, and the first step after it; None if it never ends."""

    start: int
    end: int | None


class Events(NamedTuple):
    """What happened in a run.

    Attributes:
        outcome: see above.
        final: the final loss.
        onset: of a divergence, else None.
        spikes: in order. A divergence may be one, or rise too slowly for that.
    """

    outcome: Outcome
    final: float
    onset: int | None
    spikes: tuple[Spike, ...]

    @property
    def recovered(self) -> bool:
        """Whether there were spikes, and all are over."""
        return bool(self.spikes) and all(spike.end is not None for spike in self.spikes)


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
    final, spikes = final_loss(losses), spikes_of(losses)
    width = max(round(SMOOTH * len(losses)), LEAST_SMOOTH)
    smooth = running_median(losses, width)
    best, error = float(smooth.min()), _error(losses, smooth, width)
    if best + SURE_OF_BEST * error > STUCK * ceiling:
        return Events("stuck", final, None, spikes)
    limit = best + max(LOST * (ceiling - best), SURE * error)
    if final <= limit:
        return Events("trained", final, None, spikes)
    below = np.flatnonzero(smooth <= limit)
    onset = min(int(below[-1]) + 1, len(losses) - _last(losses))
    return Events("diverged", final, onset, spikes)


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


def spikes_of(losses: Float[np.ndarray, " T"]) -> tuple[Spike, ...]:
    """The spikes of a run, in order."""
    if len(losses) <= PAST:
        return ()
    past = np.lib.stride_tricks.sliding_window_view(losses, PAST)[:-1]
    usual = np.median(past, axis=1)  # of the steps before PAST, PAST + 1, and so on
    with np.errstate(invalid="ignore"):  # most of the past may be infinite
        spread = OF_NORMAL * np.median(np.abs(past - usual[:, None]), axis=1)
        heights = np.maximum(DEVIATIONS * spread, HEIGHT * (losses[0] - usual))
    spikes: list[Spike] = []
    step = PAST
    while step < len(losses):
        before, height = usual[step - PAST], heights[step - PAST]
        if not np.isfinite(before):
            break
        if losses[step] <= before + height:
            step += 1
            continue
        end = _end(losses, step, before + height / 2)
        spikes.append(Spike(step, end))
        if end is None:
            break
        # Steps of the spike are no reference for the next one.
        step = end + PAST
    return tuple(spikes)


def _end(losses: Float[np.ndarray, " T"], start: int, level: float) -> int | None:
    """The first step that is at most `level`, as is the median of `BACK` steps from there."""
    for step in range(start + 1, len(losses) - BACK + 1):
        after = losses[step : step + BACK]
        if after[0] <= level and np.median(after) <= level:
            return step
    return None
