"""What a Llama layer saves for its backward pass, operator by operator.

Claim (the paper's table 2): with FP8 activations a layer saves 13.3 U, where BF16 saves 22.7 and
TransformerEngine 18.3. Here BF16 itself saves no more than it must, and COAT saves 8.

    python -m experiments.layers.saved      anywhere; on a GPU it also asks the allocator

`jax.vjp` returns a function that holds the arrays it needs. Their sizes are counted, weights and
scalars left out, for each operator of Llama-2-7B's layer at batch 8 x 2048 and for the whole
layer, where an array that two operators share counts once. 1 U = 2 bytes x batch x sequence x
width. cuDNN's attention also saves 4 bytes for each row and head (0.016 U), which XLA's, counted
here, does not. torch is counted, too, where it is installed, in a process of its own: the tensors
that autograd saves, each storage once. On a CPU, torch runs 512 tokens, and saves more in its norm.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from experiments.command import parser_of
from experiments.layers import Sizes
from experiments.workers import reason, run_worker

SIZES = Sizes()  # Llama-2-7B, batch 8 x 2048
PAPER = {"BF16": 22.66, "TransformerEngine": 18.33, "COAT": 13.33}
OPERATORS = {  # of the layers in JAX and torch, and what the tables call them
    "attention_input": "norm, query, key, value, rotation",
    "attention": "attention, output",
    "mlp": "norm, gate, up, activation, down",
    "forward": "the layer",
}

Units = dict[str, dict[str, float]]  # by preset, or by torch's ways, and by operator


def main() -> None:
    """Counts, writes the results, prints the table and draws the picture."""
    parser = parser_of(__doc__, draws=True)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        from experiments.layers.in_torch import saved

        for one in saved(Sizes(*options.worker), OPERATORS):
            print(json.dumps(one), flush=True)
        return
    if not options.draw:
        measure(options.out)
    draw(options.out)


def measure(folder: Path) -> None:
    """Counts in this process, and lets torch count in its own."""
    import jax

    from experiments import records
    from experiments.layers.in_jax import saved

    sizes = SIZES if jax.default_backend() == "gpu" else SIZES._replace(batch=1, sequence=512)
    units: Units = {}
    allocated: Units = {}
    ours = list(saved(SIZES, OPERATORS))
    ended = run_worker(
        "experiments.layers.saved",
        f"--worker={json.dumps(sizes)}",
        TRITON_CACHE_DIR=None,  # jax-triton takes Triton's cache away from this process
    )
    for one in [*ours, *ended.results]:
        units[one["way"]] = one["counted"]
        allocated |= {one["way"]: one["allocated"]} if one["allocated"] else {}
        print(f"{one['way']:38}", *(f"{u:6.2f}" for u in one["counted"].values()), flush=True)
    if ended.code:
        print(f"torch stopped after {len(ended.results)} ways: {reason(ended.stderr)}")
    figures: dict[str, Any] = {"units": units, "allocated": allocated, "paper": PAPER}
    records.write(folder / "activation_memory.json", figures | {"bytes of a unit": SIZES.unit})


def draw(folder: Path) -> None:
    """Draws each preset as a stack of operators, and the paper's totals beside them."""
    import matplotlib.pyplot as plt

    from experiments import records

    figures = records.read(folder / "activation_memory.json")
    operators = list(OPERATORS.values())[:-1]
    shades = ["#8c2d1c", records.ACCENT, "#f0a58f"]
    names = [f"paper:\n{name}" for name in figures["paper"]] + [*map(_name, figures["units"])]
    with plt.rc_context(records.CHART):
        figure, axes = plt.subplots(figsize=(11, 4.4))
        tops = list(figures["paper"].values())
        axes.bar(range(len(tops)), tops, color=records.PALE, width=0.65)
        for place, values in enumerate(figures["units"].values(), len(tops)):
            bottom = 0.0
            for operator, shade in zip(operators, shades, strict=True):
                axes.bar(place, values[operator], bottom=bottom, color=shade, width=0.65)
                bottom += values[operator]
            tops.append(bottom)
        for place, top in enumerate(tops):
            axes.annotate(
                f"{top:.1f}", (place, top), (0, 4), textcoords="offset points", ha="center"
            )
        for operator, shade in zip(operators, shades, strict=True):
            axes.bar(0, 0, color=shade, label=operator)
        axes.legend(frameon=False, fontsize=9)
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set_ylabel("U = 2 bytes x tokens x width")
        axes.set_title("What a Llama-2-7B layer saves for its backward pass")
        figure.savefig(folder / "activation_memory.png")


def _name(case: str) -> str:
    """A case's name, a word to a line; presets are coat_jax's."""
    preset = case.replace("_", "_ ")
    name = case.replace(",", "") if case.startswith("torch") else f"coat_jax {preset}"
    return name.replace(" ", "\n")


if __name__ == "__main__":
    main()
