"""How far Muon's update is from exact if its momentum is stored in 8 bits.

    error = sum (u' - u)^2 / sum u^2,    u of Muon with an FP32 momentum and FP32 products

Muon makes all singular values of the momentum roughly equal. Those of a real momentum span orders
of magnitude, and 8 bits add about the same error to all of them, so most of the smallest ones may
be error. Each optimizer stores its own momentum, on the gradients of one training: a small Llama on
real text, whose layers are trained by `optax.contrib.muon`.

Matrices of a layer that read the residual stream are reported apart from those that write to it.
Columns are those of [inputs, outputs]: in the first kind they are features, such as those of a
head, and differ more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers
from rich.console import Console
from rich.table import Table

import coat_jax as coat
from coat_jax.numerics import expansion, integers, noise
from coat_jax.optax.muon.newton_schulz import STANDARD
from coat_jax.storage import Storage, stochastic_below
from experiments.moments.followed import WEIGHT_DECAY, Comparison, follow, schedule

FILE, STEPS = "muon_error.json", 300
BETA = 0.95
RMS = 0.2  # of an update, about that of AdamW's
READERS, WRITERS = PARTS = ("q, k, v, gate, up", "o, down")
WRITING = ("['o']", "['down']")
IN_FP32 = Storage(min_size=1 << 60)
OURS = "8-bit integers, columns scaled"

Figures = dict[str, Any]
Coder = Callable[[Array, Array], Array]  # of a momentum and a random number for each element


def optimizers() -> dict[str, optax.GradientTransformation]:
    """The compared optimizers, by how the momentum is stored."""
    return {
        OURS: scale_by_muon(storage=Storage(min_size=0)),
        "8-bit integers": coded(partial(as_integers, size=128)),
        "8-bit integers, groups of 32": coded(partial(as_integers, size=32)),
        "E4M3, dynamic range expansion": coded(as_expanded),
        "BF16": coded(lambda m, _: m.astype(jnp.bfloat16).astype(jnp.float32)),
        "FP32, products in BF16": scale_by_muon(storage=IN_FP32, ns_dtype=jnp.bfloat16),
        "FP32, products in E4M3": with_products_in_e4m3(),
    }


def scale_by_muon(**settings: Any) -> optax.GradientTransformation:
    """Muon of the package for matrices [inputs, outputs], with products in FP32 by default."""
    return coat.optax.scale_by_fp8_muon(
        **{
            "beta": BETA,
            "ns_dtype": jnp.float32,
            "weight_dimension_numbers": MuonDimensionNumbers(0, 1),
            **settings,
        }
    )


def coded(coder: Coder) -> optax.GradientTransformation:
    """Muon whose momentum is encoded and decoded after every step."""
    exact = scale_by_muon(storage=IN_FP32)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = exact.update(grads, state, params)
        leaves, structure = jax.tree.flatten(state.mu.codes)
        keys = [noise.leaf_key(0, state.count, leaf) for leaf in range(len(leaves))]
        leaves = [
            coder(m, noise.uniform(key, m.shape, run=expansion.GROUP_SIZE))
            for m, key in zip(leaves, keys, strict=True)
        ]
        codes = jax.tree.unflatten(structure, leaves)
        return updates, state._replace(mu=state.mu._replace(codes=codes))

    return optax.GradientTransformation(exact.init, update)


def with_products_in_e4m3() -> optax.GradientTransformation:
    """Muon with an FP32 momentum that multiplies E4M3 operands, each with an exact scale."""
    exact = scale_by_muon(storage=IN_FP32)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, state = exact.update(grads, state, params)
        now, ahead = (1 - BETA**count for count in (state.count, state.count + 1))

        def direction(m: Array, g: Array) -> Array:
            return orthogonalized_in_e4m3(BETA * m / ahead + (1 - BETA) * g / now)

        return jax.tree.map(direction, state.mu.codes, grads), state

    return optax.GradientTransformation(exact.init, update)


def orthogonalized_in_e4m3(x: Array) -> Array:
    """Newton-Schulz iterations as `fp8_muon` computes them, with E4M3 operands and FP32 sums."""
    if x.shape[0] > x.shape[1]:
        return orthogonalized_in_e4m3(x.T).T
    x = x / jnp.linalg.norm(x)
    a, b, c = STANDARD
    for _ in range(5):
        gram = product_in_e4m3(x, x.T)
        x = a * x + product_in_e4m3(b * gram + c * product_in_e4m3(gram, gram), x)
    return x


def product_in_e4m3(a: Array, b: Array) -> Array:
    """The product of two matrices that are rounded to E4M3 first."""

    def rounded(x: Array) -> Array:
        scale = jnp.maximum(jnp.max(jnp.abs(x)), 1e-30) / float(jnp.finfo(coat.E4M3).max)
        return (x / scale).astype(coat.E4M3).astype(jnp.float32) * scale

    return rounded(a) @ rounded(b)


def as_integers(m: Array, uniform: Array, *, size: int) -> Array:
    """8-bit integers with one scale per group, rounded as `fp8_muon` rounds them."""
    below = stochastic_below(BETA, 1.0)
    stored = integers.encode(m, group_size=size, noise=uniform, stochastic_below=below)
    return integers.decode(stored, group_size=size)


def as_expanded(m: Array, uniform: Array) -> Array:
    """E4M3 with dynamic range expansion, rounded as `Storage(first=E4M3)` rounds momentum."""
    storage = Storage(first=coat.E4M3, second=coat.E4M3)
    dithered = storage.rounding_of_first(BETA) == "dithered"
    return expansion.decode(expansion.encode(m, coat.E4M3, noise=uniform, dithered=dithered))


def measure(steps: int, seed: int) -> Figures:
    """The errors by storage and part."""
    training = optax.contrib.muon(
        schedule(steps),
        beta=BETA,
        weight_decay=WEIGHT_DECAY,
        consistent_rms=RMS,
        muon_weight_dimension_numbers=partial(jax.tree_util.tree_map_with_path, _numbers),
    )
    comparison = Comparison(scale_by_muon(storage=IN_FP32), optimizers())
    return follow(training, {"muon": comparison}, matrices, steps=steps, seed=seed).figures()


def _numbers(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
    is_matrix = leaf.ndim == 2 and "layers" in jax.tree_util.keystr(path)
    return MuonDimensionNumbers(0, 1) if is_matrix else None


def matrices(tree: Any) -> dict[str, dict[str, Array]]:
    """The matrices of the layers, by part and path."""
    parts: dict[str, dict[str, Array]] = {part: {} for part in PARTS}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if _numbers(path, leaf):
            name = jax.tree_util.keystr(path)
            writes = any(word in name for word in WRITING)
            parts[WRITERS if writes else READERS][name] = leaf
    return parts


def show(figures: Figures) -> None:
    """Prints the errors at the end."""
    table = Table(title=f"Error of Muon's update after {figures['training']['steps']} steps")
    for column in ("momentum", *PARTS):
        table.add_column(column)
    for name, parts in figures["at the end"]["muon"].items():
        table.add_row(name, *(f"{parts[part]:.1%}" for part in PARTS))
    Console().print(table)
