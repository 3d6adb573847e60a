"""What the scale of a tensor costs: its maximum by a full pass, by group maxima, or by a bound.

Claim (the paper's figure 4b): a tensor's maximum takes a full pass over it. With group scaling the
kernel that makes the tensor also writes one maximum per group, and only those are reduced.

    python -m experiments.group_scaling                          on a GPU with FP8 units
    python -m experiments.group_scaling --rows 64 --columns 256  anywhere: a smoke test, no results

Tensors are BF16; group maxima FP32, as many for each row as `activation_forward` writes: one per 32
columns, and one per 128 when the recorded results were made. "silu(gate) up" is that kernel: alone,
with the reduction of its maxima, or with a full pass over its BF16 result, whose writing is not
counted. The bound is that of norms, |norm(x)| <= sqrt(D) max|scale|, which reads no tensor. Times
are of the kernels alone, as the profiler sees them: calls this short are lost in the time that
launching them takes.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from coat_jax.kernels import dispatch
from coat_jax.kernels.activation import COLUMNS_PER_MAXIMUM, activation_forward
from coat_jax.kernels.norm import Norm, bound_of_norm
from coat_jax.numerics.formats import E4M3
from experiments import records
from experiments.command import parser_of
from experiments.stacks import median_ms

ROWS, COLUMNS = 16384, (11008, 4096)
BLOCK = 16
CALLS = 25  # of a program, whose mean is a time
PAPER = {  # ms on an H100, by columns
    11008: {"full pass": 1.37, "group maxima": 0.10},
    4096: {"full pass": 0.55, "group maxima": 0.07},
}

console = Console()


def main() -> None:
    """Measures every size and prints the table; on a GPU writes the results and draws them."""
    parser = parser_of(__doc__, draws=True)
    parser.add_argument("--rows", type=int, default=ROWS, help="tokens")
    parser.add_argument("--columns", type=int, nargs="*", default=COLUMNS, help="widths")
    options = parser.parse_args()
    if options.draw:
        draw(options.out)
        return
    kernels = dispatch.gpu_capability() is not None and dispatch.choose(None) == "triton"
    if not kernels:
        console.print("Without a GPU with FP8 units and jax-triton, kernels are skipped.")
    cases = [
        {
            "rows": options.rows,
            "columns": columns,
            "ms": measure(options.rows, columns, kernels),
            "paper": PAPER.get(columns, {}) if options.rows == ROWS else {},
        }
        for columns in options.columns
    ]
    print_table(cases)
    if not kernels:
        console.print("No results are written: they are of a GPU.")
        return
    records.write(options.out / "group_scaling.json", {"cases": cases})
    draw(options.out)


def measure(rows: int, columns: int, kernels: bool) -> dict[str, float]:
    """Milliseconds of each way to a scale; those with a kernel only where it runs."""
    first, second, third = jax.random.split(jax.random.key(0), 3)
    gate, up, a = (
        jax.random.normal(key, (1, rows, columns), jnp.bfloat16) for key in (first, second, third)
    )
    groups = jnp.ones((1, rows, -(-columns // COLUMNS_PER_MAXIMUM)), jnp.float32)
    norm = Norm(jnp.ones(columns, jnp.bfloat16))
    largest = jax.jit(lambda x: jnp.max(jnp.abs(x)))
    reduce = jax.jit(jnp.max)
    of_norm = jax.jit(lambda norm: bound_of_norm(norm, columns))
    times = {
        "full pass": _ms(lambda: largest(a)),
        "group maxima": _ms(lambda: reduce(groups)),
        "bound": _ms(lambda: of_norm(norm)),
    }
    if not kernels:
        return times
    forward = jax.jit(lambda gate, up: activation_forward((gate, up), "silu", E4M3, BLOCK))

    # Two programs each: in one, XLA might run independent parts side by side.
    def with_groups() -> Any:
        kept, maxima = forward(gate, up)
        return kept, reduce(maxima)

    def with_full_pass() -> Any:
        kept, _ = forward(gate, up)
        return kept, largest(a)

    return times | {
        "silu(gate) up": _ms(lambda: forward(gate, up)),
        "silu(gate) up, group maxima": _ms(with_groups),
        "silu(gate) up, full pass": _ms(with_full_pass),
    }


def _ms(program: Callable[[], Any]) -> float:
    """What the kernels of one call take; without a GPU, the whole call."""

    def run() -> None:
        jax.block_until_ready(program())

    if jax.default_backend() != "gpu":
        return median_ms(run, lambda: None)
    run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                run()
        (trace,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(trace)).planes
        kernels = sum(
            event.duration_ns
            for plane in planes
            if "GPU" in plane.name
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
        )
    return kernels / CALLS / 1e6


def print_table(cases: list[dict[str, Any]]) -> None:
    """Prints times by size, and the paper's."""
    sizes = (f"{case['columns']} x {case['rows']}" for case in cases)
    table = Table("ms", *sizes, title="What a scale costs")
    for name in cases[0]["ms"]:
        table.add_row(name, *(f"{case['ms'][name]:.4f}" for case in cases))
    for name in PAPER[COLUMNS[0]]:
        times = (case["paper"].get(name) for case in cases)
        table.add_row(f"paper, H100: {name}", *("" if t is None else f"{t:.2f}" for t in times))
    console.print(table)


def draw(folder: Path) -> None:
    """Draws the ways to a maximum for each size, and the same after the activation."""
    import matplotlib.pyplot as plt

    cases = records.read(folder / "group_scaling.json")["cases"]
    with plt.rc_context(records.CHART | {"axes.grid.axis": "x"}):
        figure, panels = plt.subplots(1, len(cases), figsize=(6 * len(cases), 4), squeeze=False)
        for axes, case in zip(panels[0], cases, strict=True):
            times, ours = case["ms"], ("group maxima", "bound")
            colors = [records.ACCENT if n.endswith(ours) else records.PALE for n in times]
            bars = axes.barh(list(times), list(times.values()), color=colors, height=0.7)
            axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
            axes.invert_yaxis()
            axes.margins(x=0.12)
            axes.tick_params(axis="y", labelsize=8)
            axes.set_xlabel("ms")
            paper = ", ".join(f"{name} {ms:.2f} ms" for name, ms in case["paper"].items())
            axes.set_title(
                f"{case['columns']} x {case['rows']}\npaper, H100: {paper or 'not there'}"
            )
        figure.suptitle("What it takes to know a tensor's scale")
        figure.savefig(folder / "group_scaling.png")


if __name__ == "__main__":
    main()
