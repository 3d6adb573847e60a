"""How much of Adam's update is lost when its moments are stored in 8 bits: table 1 of COAT.

    error = sum (u' - u)^2 / sum u^2,    u = m_hat / sqrt(v_hat),    u' the same of decoded m, v

Claim: against FP8 with one scale per group, dynamic range expansion lowers the error by more than
the paper's 1.63 times. Moments are recorded in a real training, encoded and decoded once, and
rounded to nearest; `accumulated_error` measures the error in training. The paper's absolute scale
is not known, so only ratios can be compared with it; bias correction cancels within a step.

Elements whose v becomes zero in some format are left out, since u' would be infinite: this favours
the formats that lose them. The layers' matrices lose none and are reported apart from embedding and
head: in most groups of the head a rare byte's v is 1e-7 of a common one's.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool
from rich.console import Console
from rich.table import Table

from coat_jax.numerics.formats import E4M3, E5M2
from experiments.moments import coders
from experiments.moments.coders import Coder, Rows
from experiments.moments.recording import MODEL, Moments, record

FILE, STEPS = "optimizer_error.json", 240
B2S = (0.95, 0.999)
OURS = "E4M3+E / E4M3+E"  # m / v; E stands for expansion
FORMATS = {
    "E4M3": coders.plain(E4M3),
    "E4M3+E": coders.expanded(E4M3),
    "E5M2": coders.plain(E5M2),
    "E5M2+E": coders.expanded(E5M2),
}
PAIRS = {f"{m} / {v}": (FORMATS[m], FORMATS[v]) for m in FORMATS for v in FORMATS}
PAIRS["DE8 / DE8"] = coders.dynamic(signed=True), coders.dynamic(signed=False)  # bitsandbytes'
PAPER = {  # by m; the columns are v
    "E4M3": (20.10, 18.08, 25.65, 18.16),
    "E4M3+E": (15.13, 12.31, 21.96, 12.43),
    "E5M2": (37.02, 35.96, 40.30, 36.00),
    "E5M2+E": (17.79, 15.48, 23.84, 15.57),
}

Figures = dict[str, Any]


def measure(steps: int, seed: int) -> Figures:
    """The errors by b2, part of the model and format."""
    paper = dict(zip(PAIRS, [error for row in PAPER.values() for error in row], strict=False))
    figures: Figures = {"paper": paper | {"DE8 / DE8": 10.54}}
    figures["training"] = {"model": MODEL, "steps": steps}
    for b2 in B2S:
        recorded = record(b2, steps, seed)
        figures[f"b2 = {b2}"] = {
            "layers": errors([r.layers() for r in recorded], PAIRS),
            "embedding and head": errors([r.tables() for r in recorded], PAIRS),
        }
    return figures


def errors(
    moments: list[Moments], pairs: Mapping[str, tuple[Coder, Coder]]
) -> dict[str, dict[str, float]]:
    """The error of each pair of coders, over the elements that all keep.

    Args:
        moments: m and v of several steps.
        pairs: coders of m and v, by name.
    """
    sums = dict.fromkeys(pairs, 0.0)
    power = 0.0
    for exact in moments:
        first = {coder: coder(exact.m) for coder in {pair[0] for pair in pairs.values()}}
        second = {coder: coder(exact.v) for coder in {pair[1] for pair in pairs.values()}}
        kept = exact.v > 0
        for v in second.values():
            kept &= v > 0
        power += _sum(exact, jnp.zeros_like(exact.m), exact.v, kept)
        for name, (of_m, of_v) in pairs.items():
            sums[name] += _sum(exact, first[of_m], second[of_v], kept)
    return {name: {"error": squares / power} for name, squares in sums.items()}


def _sum(exact: Moments, m: Rows, v: Rows, kept: Bool[Array, "N D"]) -> float:
    """The sum of (u' - u)^2 over the elements that are kept, of rows in FP32 and of all in FP64."""
    return float(np.asarray(_sum_of_rows(exact, m, v, kept), np.float64).sum())


@jax.jit
def _sum_of_rows(exact: Moments, m: Rows, v: Rows, kept: Bool[Array, "N D"]) -> Array:
    error = exact.direction(m, v) - exact.direction(exact.m, exact.v)
    return jnp.where(kept, error**2, 0).sum(axis=1)


def show(figures: Figures) -> None:
    """Prints errors as multiples of those of dynamic range expansion."""
    columns = {"paper": {name: {"error": error} for name, error in figures["paper"].items()}}
    for b2 in B2S:
        columns |= {f"{part}, {b2}": found for part, found in figures[f"b2 = {b2}"].items()}
    table = Table("m / v", *columns, title=f"Error over that of {OURS}")
    for name in PAIRS:
        ratios = (rows[name]["error"] / rows[OURS]["error"] for rows in columns.values())
        table.add_row(name, *(f"{ratio:.3g}" for ratio in ratios))
    Console().print(table)
