"""Rounds what layers save for their backward passes to few bits, in runs that compute in BF16.

    norms      the inputs of norms
    hidden     gate and up, the inputs of an activation
    heads      q, k and v
    outputs    the outputs of attention

Any format of `Minifloat` is simulated. Each block has a scale: a power of two, as in coat_jax; or a
number of E4M3 times a power of two of the whole array, as in NVFP4. Scales are rounded up, so that
no code saturates; a stochastically rounded value is then right on average.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args
from unittest import mock

import jax
import jax.numpy as jnp

from coat_jax import E4M3, Precision
from coat_jax.numerics.blocks import fitting_exponent, from_blocks, power_of_two, to_blocks
from coat_jax.numerics.formats import nearest, round_at_random
from coat_jax.numerics.groups import join_groups, to_groups
from coat_jax.numerics.minifloat import minifloat
from coat_jax.numerics.noise import of_places, run_numbers

Name = Literal["norms", "hidden", "heads", "outputs"]
NAMES: tuple[Name, ...] = get_args(Name)


@dataclasses.dataclass(frozen=True)
class Saved:
    """What is rounded, and how.

    Attributes:
        arrays: the arrays that are rounded.
        format: of the codes.
        block: neighbours that share a scale.
        scale: the format of scales.
    """

    arrays: tuple[Name, ...] = NAMES
    format: str = "E2M1"
    block: int = 16
    scale: Literal["power of two", "E4M3"] = "power of two"


@contextlib.contextmanager
def saving(saved: Saved | None) -> Iterator[None]:
    """Layers that are traced in this context save arrays that are rounded like this."""
    if saved is None:
        yield
        return
    functions = {
        "norm": {"save_inputs": partial(_save_inputs, saved, "norms")},
        "saved_activation": {"save_inputs": partial(_save_inputs, saved, "hidden")},
        "attention": {"save_array": partial(_save_array, saved)},
    }
    with contextlib.ExitStack() as stack:
        stack.callback(jax.clear_caches)
        for name, replaced in functions.items():
            module = importlib.import_module(f"coat_jax.ops.{name}")
            stack.enter_context(mock.patch.multiple(module, **replaced))
        jax.clear_caches()  # of layers that were traced before
        yield


def _save_inputs(
    saved: Saved, name: Name, inputs: Sequence[jax.Array], precision: Precision
) -> tuple[tuple[jax.Array, ...], list[jax.Array]]:
    """In place of `definition.save_inputs`; the forward pass takes the original values."""
    assert precision.block is None
    kept = tuple(
        rounded(x, saved, stochastic=True, antithetic=i > 0) if name in saved.arrays else x
        for i, x in enumerate(inputs)
    )
    return kept, [x.astype(jnp.float32) for x in inputs]


def _save_array(
    saved: Saved,
    x: jax.Array,
    dtype: Any,
    size: None,
    *,
    stochastic: bool,
    antithetic: bool | None = None,
) -> jax.Array:
    """In place of `definition.save_array`, which is not told `antithetic` for the output."""
    del dtype, stochastic
    assert size is None
    name: Name = "outputs" if antithetic is None else "heads"
    if name not in saved.arrays:
        return x
    return rounded(x, saved, stochastic=True, antithetic=bool(antithetic))


def rounded(x: jax.Array, saved: Saved, *, stochastic: bool, antithetic: bool = False) -> jax.Array:
    """The values that the codes of an array stand for, in its dtype, which holds them exactly."""
    fmt, size = minifloat(saved.format), saved.block
    if saved.scale == "power of two":
        blocks = to_blocks(x, fmt, size=size, stochastic=stochastic, antithetic=antithetic)
        return from_blocks(blocks, size=size).astype(x.dtype)
    grouped = to_groups(x, size)
    wanted = jnp.max(jnp.abs(grouped), axis=-1, initial=0.0) / fmt.max
    unit = power_of_two(fitting_exponent(jnp.max(wanted), E4M3))
    scales = minifloat("E4M3").round(wanted / unit, jnp.zeros_like(wanted)) * unit
    y = grouped * jnp.where(scales > 0, 1 / scales, 0.0)[..., None]
    if stochastic:
        bits = of_places(run_numbers(scales.shape), size)
        y = round_at_random(y, fmt, ~bits if antithetic else bits)
    else:
        y = nearest(y, fmt)
    return join_groups(y * scales[..., None], x.shape).astype(x.dtype)
