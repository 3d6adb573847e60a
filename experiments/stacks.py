"""Stacks of Llama layers to be measured: their sizes, and how a step is timed."""

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

BATCHES, STEPS = 7, 4


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

    @property
    def weight_bytes(self) -> int:
        """Of one layer in BF16, and so of its gradients."""
        return 2 * (sum(map(math.prod, self.weights.values())) + 2 * self.width)


def median_ms(run: Callable[[], None], wait: Callable[[], None]) -> float:
    """Milliseconds of one call: the median of several batches, the device drained around each."""
    for _ in range(3):
        run()
    wait()
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(STEPS):
            run()
        wait()
        times.append((time.perf_counter() - start) / STEPS * 1e3)
    return statistics.median(times)
