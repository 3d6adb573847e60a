"""Stacks of Llama layers to be measured: their sizes, and how a step is timed."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

WARMUP, BATCHES, STEPS = 2, 9, 5  # batches, batches, calls of one batch


class Sizes(NamedTuple):
    """A layer and what goes through it."""

    width: int = 4096
    sequence: int = 2048
    batch: int = 8
    head: int = 128

    @property
    def hidden(self) -> int:
        """The MLP's width: Llama's 8/3 of the width, in whole multiples of 256 from 4096 on."""
        return {2048: 5632, 4096: 11008}.get(self.width, -(-self.width * 8 // 3 // 16) * 16)

    @property
    def unit(self) -> int:
        """Bytes of the residual stream in BF16."""
        return 2 * self.batch * self.sequence * self.width

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """The shapes of a layer's weights, inputs times outputs; two norms come with them."""
        square, wide = (self.width, self.width), (self.width, self.hidden)
        return dict.fromkeys("qkvo", square) | {"gate": wide, "up": wide, "down": wide[::-1]}


class Stack(NamedTuple):
    """Layers of one framework, ready to run."""

    step: Callable[[], None]
    forward: Callable[[], None]
    wait: Callable[[], None]  # until the device is idle
    peak: float  # bytes of a step
    saved: float  # bytes that the forward pass leaves for the backward pass


Measured = dict[int, dict[str, float]]  # by depth


def measure(stacks: dict[int, Stack]) -> Measured:
    """Milliseconds of a step and of its forward pass alone, of each stack, and its memory."""
    steps = medians_ms({depth: (stack.step, stack.wait) for depth, stack in stacks.items()})
    forwards = medians_ms({depth: (stack.forward, stack.wait) for depth, stack in stacks.items()})
    return {
        depth: {
            "ms": steps[depth],
            "forward_ms": forwards[depth],
            "peak": stack.peak,
            "saved_bytes": stack.saved,
        }
        for depth, stack in stacks.items()
    }


def medians_ms(
    runs: Mapping[int, tuple[Callable[[], None], Callable[[], None]]],
) -> dict[int, float]:
    """Milliseconds of one call of each: medians over batches, the device drained around each.

    Each call is a function to run and one that waits for it. The calls take turns: a GPU at its
    power limit changes its clocks by the second, and compared calls must run at the same clocks.
    """
    times: dict[int, list[float]] = {key: [] for key in runs}
    for batch in range(-WARMUP, BATCHES):
        for key, (run, wait) in runs.items():
            wait()
            start = time.perf_counter()
            for _ in range(STEPS):
                run()
            wait()
            if batch >= 0:
                times[key].append((time.perf_counter() - start) / STEPS * 1e3)
    return {key: statistics.median(values) for key, values in times.items()}


def median_ms(run: Callable[[], None], wait: Callable[[], None]) -> float:
    """Milliseconds of one call."""
    return medians_ms({0: (run, wait)})[0]
