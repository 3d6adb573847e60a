"""One run of `fine_tuning --parts`, in a process of its own: which part of FP8 products costs what.

    python -m experiments.fine_tuning.parts JOB.json

It trains and tunes as `run` does, with some operands of the products rounded to FP8 and the
products in BF16. Then it evaluates the network as it was before tuning, with the forward pass's
inputs or weights rounded in all layers' products, or only in those of one kind.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from coat_jax import BF16
from coat_jax.kernels import gemm
from experiments.fine_tuning import run as tuning
from experiments.fine_tuning.run import Found, tuned
from experiments.fine_tuning.ways import PARTS
from experiments.loss_study import operands
from experiments.loss_study.arm import Settings
from experiments.loss_study.run import Job, losses_in, work
from experiments.row_files import Row

OPERANDS: tuple[operands.Name, ...] = ("inputs", "weights")
# Which products are rounded, by the width and the number of columns of their weight and by the
# width of the MLP.
PLACES: dict[str, Callable[[int, int, int], bool]] = {
    "all": lambda k, n, ffn: True,
    "attention": lambda k, n, ffn: ffn not in (k, n),
    "gate and up": lambda k, n, ffn: n == ffn,
    "down": lambda k, n, ffn: k == ffn,
}


def main() -> None:
    """Trains, tunes, evaluates, and writes the row unless it was stopped."""
    work(run, __doc__)


def row_of(*arguments: Any) -> Row:
    """A row before it is measured: that of `run` for these ways."""
    return tuning.row_of(*arguments, of=PARTS)


def cost_of(settings: Settings) -> float:
    """A run, in tokens that are trained on."""
    return tuning.cost_of(settings, of=PARTS, more=len(OPERANDS) * len(PLACES))


def run(job: Job, stopped: list[int]) -> Found | None:
    """What was measured; None if somebody wrote to `stopped` before it was complete."""
    tuner = tuned(job, stopped, PARTS)
    if tuner is None:
        return None
    trained = tuner.trained
    model = trained.config.model
    forward: dict[str, dict[str, list[float]]] = {name: {} for name in OPERANDS}
    for name in OPERANDS:
        for place, chosen in PLACES.items():
            if stopped:
                return None
            with rounding(name, partial(chosen, ffn=model.ffn)):
                forward[name][place] = losses_in(
                    BF16, trained.state.params, trained.config, trained.mesh, tuner.held_out
                )
    return tuner.row() | {"forward": forward}


@contextlib.contextmanager
def rounding(name: operands.Name, chosen: Callable[[int, int], bool]) -> Iterator[None]:
    """Layers that are traced in this context round this operand of the chosen forward products.

    Args:
        name: of the operand.
        chosen: by the width and the number of columns of the weight.
    """
    exact = gemm.product
    with operands.rounding([name]):
        rounded = gemm.product

        def product(x: gemm.Operand, w: gemm.Operand, dtype: Any) -> Any:
            assert w.values is not None, "only operands in BF16 are rounded"
            return (rounded if chosen(*w.values.shape) else exact)(x, w, dtype)

        gemm.product = product
        yield


if __name__ == "__main__":
    main()
