"""Llama layers to be measured: their sizes, and stacks of them, ready to run.

`python -m experiments.layers` measures the time of a layer, `python -m experiments.layers.saved`
what it saves for its backward pass.
"""

from collections.abc import Callable
from typing import NamedTuple

from experiments.timing import medians_ms


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
    saved: float  # bytes that the forward pass leaves for the backward pass


Measured = dict[int, dict[str, float]]  # by depth


def measure(stacks: dict[int, Stack]) -> Measured:
    """Milliseconds of a step and of its forward pass alone, of each stack, and what it saves."""
    steps = medians_ms([(stack.step, stack.wait) for stack in stacks.values()])
    forwards = medians_ms([(stack.forward, stack.wait) for stack in stacks.values()])
    return {
        depth: {"ms": ms, "forward_ms": forward, "saved_bytes": stack.saved}
        for (depth, stack), ms, forward in zip(stacks.items(), steps, forwards, strict=True)
    }
