"""What coders of Adam's moments do to its update, measured on recorded moments.

    error = sum (u' - u)^2 / sum u^2,    u = m_hat / sqrt(v_hat),    u' the same of decoded m, v

over all elements of all steps, except those whose v is zero or becomes zero in a coder of the same
table, where u' would be infinite. This favours the coders that lose them, plain FP8 above all.
`Error.adam` is the same over every element with Adam's own u = m_hat / (sqrt(v_hat) + 1e-8), which
the lost elements dominate: their m is divided by 1e-8.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from coat_jax.numerics.formats import E4M3, E5M2
from experiments.moments import coders
from experiments.moments.coders import Coder, Exponent
from experiments.moments.recording import EPS, Moments

FORMATS = ("E4M3", "E4M3+E", "E5M2", "E5M2+E")
GROUP_SIZES = (32, 64, 128, 256, 512)
GRANULARITIES = (1, 2, 4, 8, 16, None)
FLOORS = (1.0, 1 / 2, 1 / 4, 1 / 16)
BOTTOMS = (9, 8, 7, 6, 5)
DEAD_SCALES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of gradients; of v, their squares

OURS = coders.expanded(E4M3)
PLAIN = coders.plain(E4M3)

Rows = Float[Array, "N D"]
Mask = Bool[Array, "N D"]
Pair = tuple[Coder, Coder]  # of the first moment and of the second


class Error(NamedTuple):
    """What a pair of coders does to u; see the equation above."""

    error: float
    adam: float
    lost: int  # elements whose v becomes zero


Errors = dict[str, Error]


def measure(
    moments: list[Moments], pairs: Mapping[str, Pair], where: list[Mask] | None = None
) -> Errors:
    """The errors of pairs of coders, over the elements that all of them keep.

    Args:
        moments: m and v of several steps.
        pairs: coders of m and v, by name.
        where: which elements count, per step; all by default.
    """
    squares = {name: np.zeros(3) for name in pairs}
    power = np.zeros(2)
    for i, exact in enumerate(moments):
        first = {coder: coder(exact.m) for coder in {pair[0] for pair in pairs.values()}}
        second = {coder: coder(exact.v) for coder in {pair[1] for pair in pairs.values()}}
        counted = jnp.ones(exact.m.shape, bool) if where is None else where[i]
        kept = counted & (exact.v > 0)
        for v in second.values():
            kept &= v > 0
        nothing = jnp.zeros_like(exact.m)
        power += _squares(exact, nothing, exact.v, kept, counted)[:2]
        for name, (coder_m, coder_v) in pairs.items():
            squares[name] += _squares(exact, first[coder_m], second[coder_v], kept, counted)
    return {
        name: Error(*(float(x) for x in s[:2] / np.maximum(power, 1e-30)), int(s[2]))
        for name, s in squares.items()
    }


def _squares(exact: Moments, m: Rows, v: Rows, kept: Mask, counted: Mask) -> np.ndarray:
    """Sums of (u' - u)^2 over the kept, of Adam's over all counted, and how many were lost."""
    return np.asarray(_squares_by_row(exact, m, v, kept, counted), np.float64).sum(axis=1)


@jax.jit
def _squares_by_row(exact: Moments, m: Rows, v: Rows, kept: Mask, counted: Mask) -> Array:
    bare = exact.direction(m, v, 0.0) - exact.direction(exact.m, exact.v, 0.0)
    adam = exact.direction(m, v, EPS) - exact.direction(exact.m, exact.v, EPS)
    lost = counted & (exact.v > 0) & (v == 0)
    return jnp.stack(
        [
            jnp.where(kept, bare**2, 0).sum(axis=1),
            jnp.where(counted, adam**2, 0).sum(axis=1),
            lost.sum(axis=1, dtype=jnp.float32),
        ]
    )


def table_1(moments: list[Moments]) -> Errors:
    """The 16 cells of the paper, m / v, and those with bitsandbytes' data type."""
    formats = dict(
        zip(FORMATS, (PLAIN, OURS, coders.plain(E5M2), coders.expanded(E5M2)), strict=True)
    )
    pairs = {f"{m} / {v}": (formats[m], formats[v]) for m in FORMATS for v in FORMATS}
    pairs["DE8 / DE8"] = coders.dynamic(signed=True), coders.dynamic(signed=False)
    pairs["DE8+E / E4M3+E"] = coders.dynamic_expanded(signed=True), OURS
    return measure(moments, pairs)


def group_sizes(moments: list[Moments]) -> Errors:
    """Plain and expanded E4M3 by group size."""
    pairs = {f"plain {size}": (coders.plain(E4M3, size),) * 2 for size in GROUP_SIZES}
    pairs |= {f"expanded {size}": (coders.expanded(E4M3, size),) * 2 for size in GROUP_SIZES}
    return measure(moments, pairs)


def exponents(moments: list[Moments]) -> Errors:
    """k in multiples of 1 / steps, and floors under it; coat_jax has 16 steps and floor 1."""
    rules = {f"steps {steps}": Exponent(steps=steps) for steps in GRANULARITIES}
    rules |= {f"floor {floor:g}": Exponent(floor=floor) for floor in FLOORS}
    pairs = {name: (coders.with_exponent(rule),) * 2 for name, rule in rules.items()}
    pairs["authors"] = (coders.with_exponent(coders.AUTHORS),) * 2
    return measure(moments, {"ours": (OURS, OURS), **pairs})


def ranges(moments: list[Moments]) -> Errors:
    """Which code the smallest element of a group is placed at: 2^-9 is E4M3's smallest, ours."""
    pairs = {}
    for bottom in BOTTOMS:
        coder = coders.with_exponent(coders.smallest_at(bottom))
        pairs[f"m 2^-{bottom}"] = coder, OURS
        pairs[f"v 2^-{bottom}"] = OURS, coder
    e5m2 = coders.expanded(E5M2)
    return measure(moments, {"ours": (OURS, OURS), **pairs, "v E5M2+E": (OURS, e5m2)})


def rounding(moments: list[Moments], seed: int) -> Errors:
    """One rounding of m / v, to nearest or stochastically."""
    first = {"nearest": OURS, "stochastic": coders.stochastic(seed)}
    second = {"nearest": OURS, "stochastic": coders.stochastic(seed + 1)}
    return measure(moments, {f"{m} / {v}": (first[m], second[v]) for m in first for v in second})


def dead_member(moments: list[Moments], seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Scales down one element's gradients per group: its neighbours' errors and its own.

    Its own error is `Error.adam`, because plain FP8 often rounds its v to zero.
    """
    pairs = {
        "floor 1": (OURS,) * 2,
        "floor 1/2": (coders.with_exponent(Exponent(floor=1 / 2)),) * 2,
        "floor 1/16": (coders.with_exponent(Exponent(floor=1 / 16)),) * 2,
        "plain": (PLAIN,) * 2,
    }
    tables = {}
    for scale in DEAD_SCALES:
        injected, dead = _with_dead_members(moments, scale, seed)
        tables[f"{scale:g}"] = {
            "neighbours": {
                name: e.error for name, e in measure(injected, pairs, [~d for d in dead]).items()
            },
            "itself": {name: e.adam for name, e in measure(injected, pairs, dead).items()},
        }
    return tables


def zero_member(moments: list[Moments], seed: int) -> Errors:
    """One zero per group, and its neighbours: the authors' kernel takes it for the minimum."""
    injected, dead = _with_dead_members(moments, 0.0, seed)
    left_out = Exponent(floor=1 / 16, ceiling=math.inf, log2_range=coders.AUTHORS.log2_range)
    pairs = {
        "ours": (OURS,) * 2,
        "authors": (coders.with_exponent(coders.AUTHORS),) * 2,
        "authors, zeros left out": (coders.with_exponent(left_out),) * 2,
    }
    return measure(injected, pairs, [~d for d in dead])


def _with_dead_members(
    moments: list[Moments], scale: float, seed: int
) -> tuple[list[Moments], list[Mask]]:
    """Scales the gradients of one random element of each group, and returns where these are."""
    random = np.random.default_rng(seed)
    lanes = np.arange(coders.GROUP_SIZE)
    injected, where = [], []
    for exact in moments:
        member = random.integers(len(lanes), size=(exact.m.size // len(lanes), 1))
        dead = jnp.asarray(member == lanes).reshape(exact.m.shape)
        m = jnp.where(dead, exact.m * scale, exact.m)
        v = jnp.where(dead, exact.v * scale * scale, exact.v)
        injected.append(exact._replace(m=m, v=v))
        where.append(dead)
    return injected, where


def exponent_quantiles(moments: list[Moments]) -> dict[str, list[float]]:
    """The 5 %, 50 % and 95 % quantiles of the k that groups get."""

    def quantiles(rows: list[Rows]) -> list[float]:
        groups = jnp.abs(jnp.concatenate(rows)).reshape(-1, coders.GROUP_SIZE)
        k = Exponent()(groups)[groups.max(axis=-1) > 0]
        return [float(q) for q in np.quantile(np.asarray(k), (0.05, 0.5, 0.95))]

    return {"m": quantiles([x.m for x in moments]), "v": quantiles([x.v for x in moments])}
