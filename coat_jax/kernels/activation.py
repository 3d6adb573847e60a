"""The elementwise part of an MLP, and its gradient.

    hidden = (gate, up)     a = act(gate) * up
    hidden = (up,)          a = act(up)

`activate` and `activate_backward` are the references, in FP32. `gradient_bounds` bounds the
gradients without computing them, from the exponents of the saved blocks.

The kernels go from FP8 to FP8. The scale of a tensor must be known before its codes are written, so
a forward pass runs one of the first two pairs of kernels:

    activation_forward          hidden -> blocks, maxima of |a|
    activation_cast             blocks -> a as one FP8 tensor
    activation_forward_exact    hidden -> blocks, maxima of |a|, a with many scales
    activation_rescale          a, maxima -> a as one FP8 tensor, or as rows of INT8
    activation_backward         blocks, da -> the gradients of hidden in FP8, in both layouts;
                                a as one FP8 tensor, transposed

The first pair computes a from the decoded blocks, the second pair from hidden itself. Each maximum
is over 32 columns of a row: the maxima are few enough to be reduced quickly, and the columns narrow
enough that a mesh can shard widths like 11008 = 32 x 344.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import dispatch, int8
from coat_jax.kernels.launch import launch, tile_count
from coat_jax.kernels.sharding import as_3d, run_sharded
from coat_jax.numerics.blocks import Blocks, block_numbers, power_of_two
from coat_jax.numerics.formats import format_of
from coat_jax.numerics.noise import element_numbers

# The activations that the Triton kernels compute. XLA computes any other of ACTIVATIONS.
InKernels = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
Activation = InKernels | str

# A new activation is one entry, as in ACTIVATIONS["swish"] = jax.nn.swish.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}

COLUMNS_PER_MAXIMUM = 32  # or a block, if that is wider
# Per pass: rows and columns of a tile, warps of a program. The fastest of several choices on H200.
TILES = {
    "forward": (32, 128, 4),
    "exact": (16, 128, 4),
    "cast": (32, 128, 8),
    "backward": (32, 128, 8),
}


def has_kernel(name: str) -> bool:
    """Whether the Triton kernels compute an activation; XLA computes any."""
    return name in get_args(InKernels)


def require_activation(name: str) -> None:
    """Raises unless there is an activation of this name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} must be one of {tuple(ACTIVATIONS)}.")


def activate(
    hidden: Sequence[Float[Array, "*rows F"]], activation: Activation
) -> Float[Array, "*rows F"]:
    """act(gate) * up, or act(up), in FP32."""
    first, *gated = (h.astype(jnp.float32) for h in hidden)
    a = ACTIVATIONS[activation](first)
    return a * gated[0] if gated else a


def activate_backward(
    hidden: Sequence[Float[Array, "*rows F"]], da: Float[Array, "*rows F"], activation: Activation
) -> tuple[Float[Array, "*rows F"], ...]:
    """The gradients of `hidden`, in FP32."""
    first, *gated = (h.astype(jnp.float32) for h in hidden)
    da = da.astype(jnp.float32)
    a, pull = jax.vjp(ACTIVATIONS[activation], first)
    return (*pull(da * gated[0]), da * a) if gated else pull(da)


def gradient_bounds(
    hidden: Sequence[Blocks], da_bound: Float[Array, "*rows"], activation: Activation
) -> tuple[Float[Array, ""], ...]:
    """An upper bound of the magnitudes in the gradient of each of `hidden`.

    It is computed from the largest values that the exponents of `hidden` allow, without the codes.

    Args:
        hidden: the saved blocks.
        da_bound: an upper bound of the magnitudes in each row of the activation's gradient.
        activation: the activation.
    """
    da_bound = da_bound[..., None]
    first, *gated = (format_of(h.codes.dtype).max * power_of_two(h.exponents) for h in hidden)
    value, slope = activation_bounds(first, activation)
    limits = (da_bound * slope * gated[0], da_bound * value) if gated else (da_bound * slope,)
    return tuple(jnp.max(each, initial=0.0) for each in limits)


def activation_bounds(
    m: Float[Array, "..."], activation: Activation
) -> tuple[Array, Array | float]:
    """Upper bounds of |act(x)| and |act'(x)| where |x| <= m."""
    require_activation(activation)
    if activation == "relu2":
        return m * m, 2 * m
    return m, 1.13  # gelu has the largest slope: 1.1290 at sqrt(2)


# --- Kernels ---------------------------------------------------------------------------------


def activation_forward(
    hidden: Sequence[Float[Array, "*rows F"]],
    act: Activation,
    dtype: DTypeLike,
    size: int,
    *,
    stochastic: bool = False,
) -> tuple[tuple[Blocks, ...], Float[Array, "B S M"]]:
    """Blocks of `hidden`, with rows [B, S]; and the maxima of its activation's magnitudes.

    The blocks are rounded to nearest, or like `to_blocks(stochastic=True)`: those of up with
    `antithetic=True`, because it is multiplied by the gate's activation.
    """
    from coat_jax.kernels.triton.activation import activation_forward_tile

    blocks, (maxima,) = _forward(
        activation_forward_tile, hidden, act, dtype, size, "forward", stochastic
    )
    return blocks, maxima


def activation_forward_exact(
    hidden: Sequence[Float[Array, "*rows F"]] | Sequence[int8.Product],
    act: Activation,
    dtype: DTypeLike,
    size: int,
    *,
    stochastic: bool = False,
    in_int8: bool = False,
) -> tuple[tuple[Blocks, ...], Array, Float[Array, "B S M"]]:
    """Blocks of `hidden`; the activation's codes [B, S, F]; the maxima of its magnitudes.

    Each maximum sets the scale of its codes: in FP8 a power of two, with `in_int8` the scale that
    maps the maximum to 127. A maximum covers the activations of hidden and of its decoded blocks,
    because the backward pass recomputes the latter with the scale of the forward pass. The blocks
    are rounded as in `activation_forward`. Unscaled INT8 products in hidden are scaled here.
    """
    from coat_jax.kernels.triton.activation import activation_forward_exact_tile

    blocks, (codes, maxima) = _forward(
        activation_forward_exact_tile, hidden, act, dtype, size, "exact", stochastic, in_int8
    )
    return blocks, codes, maxima


def _forward(
    kernel: Any,
    hidden: Sequence[Float[Array, "*rows F"]] | Sequence[int8.Product],
    act: Activation,
    dtype: DTypeLike,
    size: int,
    pass_: Literal["forward", "exact"],
    stochastic: bool,
    in_int8: bool = False,
) -> tuple[tuple[Blocks, ...], list[Array]]:
    """Blocks of `hidden`, and the kernel's other results: codes if "exact", then maxima."""
    products = [h for h in hidden if isinstance(h, int8.Product)]
    values = [as_3d(h.sums if isinstance(h, int8.Product) else h) for h in hidden]
    scales = [products[0].row_scale, *(p.column_scale for p in products)] if products else []
    count, scale_count = len(values), len(scales)
    per_maximum = max(size, COLUMNS_PER_MAXIMUM)
    exact = pass_ == "exact"
    numbers = block_numbers(values[0].shape, size) if stochastic else ()

    def run(*arrays: Array) -> list[Array]:
        hidden, rest = arrays[:count], arrays[count:]
        scales, numbers = rest[:scale_count], rest[scale_count:] or arrays[:1] * 2
        # Row scales, and column scales of the first and the last.
        scaling = (scales[0], scales[1], scales[-1]) if scales else arrays[:1] * 3
        *rows, columns = hidden[0].shape
        codes = jax.ShapeDtypeStruct(hidden[0].shape, dtype)
        of_result = jax.ShapeDtypeStruct(codes.shape, jnp.int8 if in_int8 else dtype)
        exponents = jax.ShapeDtypeStruct((*rows, -(-columns // size)), jnp.uint8)
        maxima = jax.ShapeDtypeStruct((*rows, -(-columns // per_maximum)), jnp.float32)
        return launch(
            kernel,
            hidden[0],
            hidden[-1],
            *(scaling if exact else ()),
            *numbers,
            outputs=[codes, exponents, codes, exponents, *[of_result] * exact, maxima],
            **_tiles(rows, columns, size, pass_),
            PER_MAXIMUM=per_maximum,
            NAME=act,
            GATED=count == 2,
            STOCHASTIC=stochastic,
            F8=format_of(dtype),
            FAST=not dispatch.interpreting(),
        )

    blocked = ["b s f", f"b s f/{size}"]
    results = [*blocked, *blocked, *["b s f"] * exact, f"b s f/{per_maximum}"]
    operands = ["b s f"] * count + (["b s"] + ["f"] * len(products)) * bool(products)
    operands += ["b s", f"f/{size}"] * stochastic
    written = run_sharded(run, [*values, *scales, *numbers], operands, results)
    blocks = (Blocks(*written[:2]), Blocks(*written[2:4]))
    return blocks[:count], list(written[4:])


def activation_cast(
    hidden: Sequence[Blocks], act: Activation, scale: Float[Array, ""], size: int
) -> Array:
    """act(hidden) / scale as FP8 codes, in the blocks' format."""
    from coat_jax.kernels.triton.activation import activation_cast_tile

    def run(scale: Array, *parts: Array) -> list[Array]:
        *rows, columns = parts[0].shape
        return launch(
            activation_cast_tile,
            *parts[:2],
            *parts[-2:],
            scale,
            outputs=[jax.ShapeDtypeStruct(parts[0].shape, parts[0].dtype)],
            **_tiles(rows, columns, size, "cast"),
            NAME=act,
            GATED=len(parts) == 4,
            F8=format_of(parts[0].dtype),
            FAST=not dispatch.interpreting(),
        )

    parts = [part for blocks in hidden for part in blocks]
    (result,) = run_sharded(run, [scale, *parts], ["", *_axes(hidden, size)], ["b s f"])
    return result


def activation_rescale(
    codes: Float[Array, "B S F"],
    maxima: Float[Array, "B S M"],
    scale: Float[Array, ""] | Float[Array, "B S"],
    size: int,
) -> Array:
    """The codes with one `scale`, in place of the scales that the maxima set.

    In FP8 all scales are powers of two, so a code changes only where it becomes subnormal. INT8
    codes are rounded a second time, to one scale per row; `scale` has the rows' largest magnitudes.
    """
    from coat_jax.kernels.triton.activation import activation_rescale_tile
    from coat_jax.kernels.triton.int8 import int8_rescale_tile

    per_maximum = max(size, COLUMNS_PER_MAXIMUM)
    in_int8 = codes.dtype == jnp.int8

    def run(codes: Array, maxima: Array, scale: Array) -> list[Array]:
        *rows, columns = codes.shape
        formats: dict[str, Any] = {}
        if not in_int8:
            formats = {"F8": format_of(codes.dtype), "FAST": not dispatch.interpreting()}
        return launch(
            int8_rescale_tile if in_int8 else activation_rescale_tile,
            codes,
            maxima,
            scale,
            outputs=[jax.ShapeDtypeStruct(codes.shape, codes.dtype)],
            **_tiles(rows, columns, per_maximum, "cast"),
            **formats,
        )

    axes = ["b s f", f"b s f/{per_maximum}", "b s" if in_int8 else ""]
    (result,) = run_sharded(run, [codes, maxima, scale], axes, ["b s f"])
    return result


def activation_backward(
    hidden: Sequence[Blocks],
    da: Float[Array, "*rows F"],
    act: Activation,
    scale: Float[Array, ""],
    gradient_scales: Sequence[Float[Array, ""]],
    size: int,
    dtype: DTypeLike,
    *,
    stochastic: bool = False,
) -> tuple[Array, list[tuple[Array, Array]]]:
    """act(hidden) / scale as codes [F, B, S]; the gradients likewise, [B, S, F] and [F, B, S].

    Args:
        hidden: the saved blocks.
        da: the gradient of act(hidden).
        act: the activation.
        scale: of act(hidden), as in the forward pass.
        gradient_scales: one for each of `hidden`.
        size: of the blocks.
        dtype: of the gradients' codes; the activation's are in the blocks' format.
        stochastic: rounds gradients and activation like `cast`, each with its own stream.
    """
    from coat_jax.kernels.triton.activation import (
        activation_backward_tile,
        activation_backward_ungated_tile,
    )

    parts = [part for blocks in hidden for part in blocks]
    da = as_3d(da)
    numbers: list[Array] = []
    if stochastic:
        numbers = [element_numbers(da.shape, "inputs")[0], *element_numbers(da.shape, "gradients")]

    def run(da: Array, scale: Array, first: Array, last: Array, *rest: Array) -> list[Array]:
        *rows, columns = da.shape
        parts, numbers = rest[: 2 * len(hidden)], rest[2 * len(hidden) :]
        straight = jax.ShapeDtypeStruct(da.shape, dtype)
        transposed = jax.ShapeDtypeStruct((columns, *rows), dtype)
        recomputed = jax.ShapeDtypeStruct((columns, *rows), parts[0].dtype)
        return launch(
            activation_backward_tile if len(parts) == 4 else activation_backward_ungated_tile,
            da,
            *parts[:2],
            *parts[-2:],
            scale,
            first,
            last,
            *(numbers or (da, da, da)),
            outputs=[recomputed, *[straight, transposed] * (len(parts) // 2)],
            **_tiles(rows, columns, size, "backward"),
            NAME=act,
            GATED=len(parts) == 4,
            STOCHASTIC=stochastic,
            F8=format_of(parts[0].dtype),
            GRADIENT_F8=format_of(dtype),
            FAST=not dispatch.interpreting(),
        )

    recomputed, *codes = run_sharded(
        run,
        [da, scale, gradient_scales[0], gradient_scales[-1], *parts, *numbers],
        ["b s f", "", "", "", *_axes(hidden, size), *["b s", "b s", "f"][: len(numbers)]],
        ["f b s", *["b s f", "f b s"] * len(hidden)],
    )
    return recomputed, list(zip(codes[::2], codes[1::2], strict=True))


def _axes(hidden: Sequence[Blocks], size: int) -> list[str]:
    """The named axes of the codes and exponents of blocks, for `run_sharded`."""
    return ["b s f", f"b s f/{size}"] * len(hidden)


def _tiles(rows: Sequence[int], columns: int, size: int, pass_: str) -> dict[str, Any]:
    """The arguments of `launch` that divide an array into tiles."""
    count = math.prod(rows)
    tile_rows, tile_columns, warps = TILES[pass_]
    tile_columns = max(tile_columns, size)
    return {
        "programs": tile_count(count, columns, tile_rows, tile_columns),
        "warps": warps,
        "ROWS": count,
        "COLUMNS": columns,
        "TILE_ROWS": tile_rows,
        "TILE_COLUMNS": tile_columns,
        "SIZE": size,
    }
