"""How long a call takes on a device: medians over batches of calls, the device drained between."""

import statistics
import time
from collections.abc import Callable, Sequence

Run = tuple[Callable[[], None], Callable[[], None]]  # a call, and what waits until it is done


def medians_ms(
    runs: Sequence[Run], *, warmup: int = 2, batches: int = 9, calls: int = 5
) -> list[float]:
    """Milliseconds of one call of each run.

    The runs take turns: a GPU at its power limit changes its clocks by the second, and compared
    calls must run at the same clocks.

    Args:
        runs: what is measured.
        warmup: batches that do not count.
        batches: those whose median counts.
        calls: of one batch.
    """
    times: list[list[float]] = [[] for _ in runs]
    for batch in range(-warmup, batches):
        for (call, wait), of_run in zip(runs, times, strict=True):
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            wait()
            if batch >= 0:
                of_run.append((time.perf_counter() - start) / calls * 1e3)
    return [statistics.median(of_run) for of_run in times]


def median_ms(
    call: Callable[[], None],
    wait: Callable[[], None],
    *,
    warmup: int = 2,
    batches: int = 9,
    calls: int = 5,
) -> float:
    """Milliseconds of one call."""
    return medians_ms([(call, wait)], warmup=warmup, batches=batches, calls=calls)[0]
