"""How long a call takes on a device: medians over batches of calls, the device drained between."""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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


def kernels_ms(runs: Sequence[Run], *, turns: int = 3, calls: int = 3) -> list[float]:
    """Milliseconds that the GPU's kernels run in one call of each run, from profiles.

    A program is a CUDA graph, which is changed for new results before it is launched. Where kernels
    take microseconds, that takes as long as they do.
    """
    import jax

    times: list[list[float]] = [[] for _ in runs]
    for call, wait in runs:
        call()
        wait()
    for _ in range(turns):
        for (call, wait), of_run in zip(runs, times, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for _ in range(calls):
                        call()
                    wait()
                (file,) = Path(folder).rglob("*.xplane.pb")
                data = jax.profiler.ProfileData.from_file(str(file))
                gpus = [plane for plane in data.planes if "GPU" in plane.name]
                lines = [line for gpu in gpus for line in gpu.lines if "Stream" in line.name]
                ran = sum(event.duration_ns for line in lines for event in line.events)
                of_run.append(ran / calls / 1e6)
    return [statistics.median(of_run) for of_run in times]
