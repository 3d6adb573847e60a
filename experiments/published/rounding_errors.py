"""How large the errors are that rounding to 8 bits adds to moments, bounds and activations."""

import numpy as np

from experiments.published.results import bold, of

B2S = (0.95, 0.999)
PARTS = ("layers", "embedding and head")
DEFAULT = "directions and logarithms, v stochastic"
MOMENTS = (
    DEFAULT,
    "directions and logarithms, v to nearest",
    "directions and logarithms, m alone",
    "directions and logarithms, v alone",
    "directions and logarithms, groups of 64",
    "directions and logarithms, groups of 32",
    "dynamic range expansion, v stochastic",
    "dynamic range expansion, v to nearest",
    "one scale per group, v stochastic",
    "bitsandbytes' code, v stochastic",
    "bitsandbytes' code, v to nearest",
    "FlashOptim's codes, v stochastic",
    "FlashOptim's codes, v to nearest",
)
PLAIN, EXPANDED = "E4M3 / E4M3", "E4M3+E / E4M3+E"  # with one scale per group; expanded
COLUMNS_SCALED = "8-bit integers, columns scaled"
BOUNDS = (
    ("norm's output", "as trained"),
    ("norm's output", "norm's scale times 100"),
    ("norm's output", "norm's scale times 1000"),
    ("gradient of gate", "as trained"),
    ("gradient of gate", "down times 1000"),
    ("gradient of up", "as trained"),
    ("gradient of up", "down times 1000"),
)
BLOCKS = {
    "1 x 16, 2^n (ours)": "**E4M3, 16, power of two**",
    "1 x 16": "E4M3, 16, FP32",
    "1 x 64": "E4M3, 64, FP32",
    "per tensor": "E4M3, whole tensor, FP32",
    "1 x 16, INT8": "INT8, 16, FP32",
}


def moments() -> list[list[str]]:
    """The error of the update at the end of accumulated_error, by format, part and b2."""
    found = of("accumulated_error")["at the end"]
    rows = [["moments stored with", *(f"{part}, b2 = {b2}" for part in PARTS for b2 in B2S)]]
    for name in MOMENTS:
        errors = [found[f"b2 = {b2}"][name][part] for part in PARTS for b2 in B2S]
        rows.append([bold(cell, name == DEFAULT) for cell in (name, *map(_rounded, errors))])
    return rows


def plain_over_expanded(part: str) -> str:
    """The error of plain FP8 over that of dynamic range expansion, of exact moments."""
    errors = of("optimizer_error")["b2 = 0.95"][part.replace("_", " ")]
    return f"{errors[PLAIN]['error'] / errors[EXPANDED]['error']:.2f}"


def muon() -> list[list[str]]:
    """The error of Muon's update at the end of muon_error, by storage and part."""
    parts = ("q, k, v, gate, up", "o, down")
    rows = [["momentum", *(f"{part}, %" for part in parts)]]
    for name, errors in of("muon_error")["at the end"]["muon"].items():
        cells = name, *(f"{100 * errors[part]:.1f}" for part in parts)
        rows.append([bold(cell, name == COLUMNS_SCALED) for cell in cells])
    return rows


def bounds() -> list[list[str]]:
    """How loose bounds are, and the error of what they scale."""
    found = of("bound_looseness")["bounded"]
    rows = [["rounded", "outliers", "bound / largest", "error, %", "with an exact scale, %"]]
    for name, case in BOUNDS:
        one = found[name][case]
        errors = (f"{100 * one[f'error, {by}']:.2f}" for by in ("bound", "largest"))
        rows.append([name, case, f"{2 ** one['looseness']:,.0f}", *errors])
    return rows


def blocks() -> list[list[str]]:
    """Bytes and errors of saved activations, by format and scales."""
    measured = of("granularity")
    outliers = measured["outliers"]["every token"]["100"]
    errors_of = "norm's input", "norm's output", "recomputed activation", "output beside outliers"
    rows = [["format, elements per scale, scale", "bytes a value", *(f"{e}, %" for e in errors_of)]]
    for way, name in BLOCKS.items():
        one = measured["recorded"][way]
        errors = *(one["errors"][key] for key in ("x", "n", "a")), outliers[way]["n"]
        rows.append([name, f"{one['bytes']:.3g}", *(f"{100 * error:.1f}" for error in errors)])
    return rows


def _rounded(number: float) -> str:
    """Two digits, without an exponent."""
    return np.format_float_positional(float(f"{number:.2g}"), trim="-")
