"""What a Llama layer saves for its backward pass, operator by operator.

Claim (the paper's table 2): with FP8 activations a layer saves 13.3 U, where BF16 saves 22.7 and
TransformerEngine 18.3. Here BF16 itself saves no more than it must, and COAT saves 8.

    python -m experiments.activation_memory      anywhere; on a GPU it also asks the allocator

`jax.vjp` returns a function that holds the arrays it needs. Their sizes are counted, weights and
scalars left out, for each operator of Llama-2-7B's layer at batch 8 x 2048 and for the whole
layer, where an array that two operators share counts once. 1 U = 2 bytes x batch x sequence x
width. cuDNN's attention also saves 4 bytes for each row and head (0.016 U), which XLA's, counted
here, does not. torch is counted, too, where it is installed: see stacks/saved_by_torch.py. On a
CPU, torch runs 512 tokens, for which it saves the same number of U.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from experiments import records
from experiments.command import parser_of
from experiments.stacks import Sizes
from experiments.stacks.in_jax import (
    PRESETS,
    attention,
    attention_input,
    forward_saving,
    layer,
    mlp,
    saved_bytes,
)
from experiments.workers import reason, run_worker

SIZES = Sizes()  # Llama-2-7B, batch 8 x 2048
PAPER = {"BF16": 22.66, "TransformerEngine": 18.33, "COAT": 13.33}


# The methods of torch's layer, and what the tables call them.
OPERATORS = {
    "attention_input": "norm, query, key, value, rotation",
    "attention": "attention, output",
    "mlp": "norm, gate, up, activation, down",
    "forward": "the layer",
}

Units = dict[str, dict[str, float]]  # by preset, or by torch's ways, and by operator


def measure() -> tuple[Units, Units]:
    """U counted by preset and operator, and U allocated, where there is a GPU."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    x = array(SIZES.batch, SIZES.sequence, SIZES.width)
    heads = [array(*x.shape[:2], SIZES.width // SIZES.head, SIZES.head)] * 3
    w = {name: array(*shape) for name, shape in SIZES.weights.items()}
    w |= {"norm": array(SIZES.width), "mlp_norm": array(SIZES.width)}
    counted: Units = {}
    allocated: Units = {}
    for name, precision in PRESETS.items():
        functions = {
            "attention_input": (partial(attention_input, SIZES, precision), [x]),
            "attention": (partial(attention, precision), heads),
            "mlp": (partial(mlp, precision), [x]),
            "forward": (partial(layer, SIZES, precision), [x]),
        }
        counted[name], allocated[name] = {}, {}
        for operator, (function, arrays) in functions.items():
            title = OPERATORS[operator]
            counted[name][title] = units_saved(function, w, arrays)
            if jax.default_backend() == "gpu":
                allocated[name][title] = units_allocated(function, w, arrays)
    return counted, {name: units for name, units in allocated.items() if units}


def units_saved(function: Callable[..., Any], weights: dict[str, Any], arrays: list[Any]) -> float:
    """What the gradient of `function` needs besides weights, in U."""
    return saved_bytes(function, weights, *arrays) / SIZES.unit


def units_allocated(
    function: Callable[..., Any], weights: dict[str, Any], arrays: list[Any]
) -> float:
    """What the allocator holds for the gradient of `function` once it has run, in U."""
    device = jax.local_devices()[0]

    def in_use() -> int:
        return int((device.memory_stats() or {})["bytes_in_use"])

    zeros = partial(jax.tree.map, lambda a: jax.device_put(jnp.zeros(a.shape, a.dtype), device))
    w = zeros(weights)
    before = in_use()
    y, saved = jax.block_until_ready(jax.jit(partial(forward_saving, function))(w, *zeros(arrays)))
    held = in_use() - before - sum(leaf.nbytes for leaf in jax.tree.leaves(y))
    del saved
    return held / SIZES.unit


def torch_units() -> tuple[Units, Units, str | None]:
    """As `measure`, for torch's ways; and why there are no more of them."""
    on_gpu = jax.default_backend() == "gpu"
    sizes = SIZES if on_gpu else SIZES._replace(batch=1, sequence=512)
    request = json.dumps({"sizes": sizes._asdict(), "operators": OPERATORS})
    ended = run_worker(
        "experiments.stacks.saved_by_torch",
        request,
        TRITON_CACHE_DIR=None,  # jax-triton takes Triton's cache away from this process
    )
    counted = {one["way"]: one["counted"] for one in ended.results}
    allocated = {one["way"]: one["allocated"] for one in ended.results if one["allocated"]}
    why = reason(ended.stderr) if ended.code else None
    return counted, allocated, why


def main() -> None:
    """Counts, prints the table and writes the results."""
    parser = parser_of(__doc__)
    options = parser.parse_args()
    counted, allocated = measure()
    torch_counted, torch_allocated, why = torch_units()
    if why:
        print(f"torch stopped after {len(torch_counted)} ways: {why}")
    figures = {
        "units": counted | torch_counted,
        "allocated": allocated | torch_allocated,
        "paper": PAPER,
        "bytes of a unit": SIZES.unit,
    }
    records.write(options.out / "activation_memory.json", figures)
    for title, units in (("Saved", figures["units"]), ("Allocated", figures["allocated"])):
        if units:
            _show(f"{title} per layer, in U", units)
    draw(options.out)


def _show(title: str, units: Units) -> None:
    table = Table(title=title)
    for column in ("", *OPERATORS.values()):
        table.add_column(column, justify="right" if column else "left")
    for name, values in units.items():
        table.add_row(name, *(f"{value:.2f}" for value in values.values()))
    Console().print(table)


def draw(folder: Path) -> None:
    """Draws each preset as a stack of operators, and the paper's totals beside them."""
    import matplotlib.pyplot as plt

    figures = records.read(folder / "activation_memory.json")
    units = figures["units"]
    bars = {f"paper:\n{name}": {"total": value} for name, value in figures["paper"].items()}
    bars |= {_name(name): value for name, value in units.items()}
    operators = list(OPERATORS.values())[:-1]
    shades = ["#8c2d1c", records.ACCENT, "#f0a58f"]
    with plt.rc_context(records.CHART):
        figure, axes = plt.subplots(figsize=(11, 4.4))
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
        axes.set_xticks(range(len(bars)), list(bars), fontsize=8)
        axes.set_ylabel("U = 2 bytes x tokens x width")
        axes.set_title("What a Llama-2-7B layer saves for its backward pass")
        figure.savefig(folder / "activation_memory.png")


def _name(case: str) -> str:
    """A case's name, a word to a line."""
    name = f"coat_jax {case}" if case in PRESETS else case.replace(",", "")
    return name.replace(" ", "\n")


if __name__ == "__main__":
    main()
