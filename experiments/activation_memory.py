"""What a Llama layer keeps for its backward pass, operator by operator.

Claim (the paper's table 2): FP8 activations keep 13.3 U a layer where BF16 keeps 22.7 and
TransformerEngine 18.3. Here BF16 itself keeps no more than it must, and COAT keeps 8.

    python -m experiments.activation_memory      anywhere: nothing is computed

`jax.vjp` returns a function that holds the arrays it needs. Their sizes are counted, weights and
scalars left out, for each operator of Llama-2-7B's layer at batch 8 x 2048 and for the whole
layer, where an array that two operators share counts once. 1 U = 2 bytes x batch x sequence x
width. cuDNN's attention keeps 4 bytes a row and head besides (0.016 U), which XLA's, counted here,
does not. What a GPU's allocator says is in layer_speed.py.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from experiments import records
from experiments.stacks import Sizes
from experiments.stacks_jax import PRESETS, attention, attention_input, layer, mlp

RESULTS = Path(__file__).parent / "results"
SIZES = Sizes()  # Llama-2-7B, batch 8 x 2048
PAPER = {"BF16": 22.66, "TransformerEngine": 18.33, "COAT": 13.33}


def units_kept(function: Callable[..., Any], *arrays: Any, weights: dict[str, Any]) -> float:
    """What the gradient of `function` needs besides weights, in U."""
    pull = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *arrays, weights)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.ndim]
    ours = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(weights)}
    kept = [leaf for leaf in kept if (leaf.shape, leaf.dtype) not in ours]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in kept) / SIZES.unit


def measure() -> dict[str, dict[str, float]]:
    """U by preset and operator."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    x = array(SIZES.batch, SIZES.sequence, SIZES.width)
    head = array(*x.shape[:2], SIZES.width // SIZES.head, SIZES.head)
    w = {name: array(*shape) for name, shape in SIZES.weights.items()}
    w |= {"norm": array(SIZES.width), "mlp_norm": array(SIZES.width)}
    table = {}
    for name, p in PRESETS.items():
        table[name] = {
            "norm, query, key, value, rotation": units_kept(
                lambda x, w, p=p: attention_input(SIZES, p, w, x), x, weights=w
            ),
            "attention, output": units_kept(
                lambda q, k, v, w, p=p: attention(p, w, q, k, v), head, head, head, weights=w
            ),
            "norm, gate, up, activation, down": units_kept(
                lambda x, w, p=p: mlp(p, w, x), x, weights=w
            ),
            "the layer": units_kept(lambda x, w, p=p: layer(SIZES, p, w, x), x, weights=w),
        }
    return table


def main() -> None:
    """Counts, prints the table and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for the results")
    options = parser.parse_args()
    figures = {"units": measure(), "paper": PAPER, "bytes of a unit": SIZES.unit}
    records.write(options.out / "activation_memory.json", figures)
    console = Console()
    table = Table(title="Kept per layer, in U")
    for column in ("", *PRESETS):
        table.add_column(column, justify="right" if column else "left")
    for operator in figures["units"]["BF16"]:
        values = (f"{figures['units'][preset][operator]:.2f}" for preset in PRESETS)
        table.add_row(operator, *values)
    console.print(table)
    draw(options.out)


def draw(folder: Path) -> None:
    """Draws each preset as a stack of operators, and the paper's totals beside them."""
    import matplotlib.pyplot as plt

    figures = json.loads((folder / "activation_memory.json").read_text())["figures"]
    units = figures["units"]
    bars = {f"paper:\n{name}": {"total": value} for name, value in figures["paper"].items()}
    bars |= {f"coat_jax\n{name}": value for name, value in units.items()}
    operators = [name for name in units["BF16"] if name != "the layer"]
    shades = ["#8c2d1c", records.ACCENT, "#f0a58f"]
    with plt.rc_context(records.CHART):
        figure, axes = plt.subplots(figsize=(10, 4.4))
        for place, values in enumerate(bars.values()):
            if "total" in values:
                axes.bar(place, values["total"], color=records.PALE, width=0.65)
            bottom = 0.0
            for operator, shade in zip(operators, shades, strict=True):
                height = values.get(operator, 0.0)
                axes.bar(place, height, bottom=bottom, color=shade, width=0.65)
                bottom += height
            top = values.get("total", bottom)
            axes.annotate(
                f"{top:.1f}", (place, top), (0, 4), textcoords="offset points", ha="center"
            )
        for operator, shade in zip(operators, shades, strict=True):
            axes.bar(0, 0, color=shade, label=operator)
        axes.legend(frameon=False, fontsize=9)
        axes.set_xticks(range(len(bars)), list(bars))
        axes.set_ylabel("U = 2 bytes x tokens x width")
        axes.set_title("What a Llama-2-7B layer keeps for its backward pass")
        figure.savefig(folder / "activation_memory.png")


if __name__ == "__main__":
    main()
