"""The elementwise part of an MLP, and its gradient.

    hidden = (gate, up)     a = act(gate) * up
    hidden = (up,)          a = act(up)

With a limit, gate is at most that, and up from -limit to limit. What is saved is not limited, and
where the limit changes a decoded value, its gradient is zero.

`activate` and `activate_backward` are the references, in FP32. `gradient_bounds` bounds the
gradients without computing them, from the exponents of the saved blocks.

The kernels go from FP8 to FP8. The scale of a tensor must be known before its codes are written, so
a forward pass runs two kernels, the first one and one of the next two:

    activation_forward     hidden -> blocks, maxima of |a|; if exact, a with many scales
    activation_cast        blocks -> a as one FP8 tensor
    activation_rescale     a, maxima -> a as one FP8 tensor, or as rows of INT8
    activation_backward    blocks, da -> the gradients of hidden in FP8, in both layouts;
                           a as one FP8 tensor, transposed

The second is `activation_cast`, which computes a from the decoded blocks; or, if the forward pass
is exact, `activation_rescale` of the a that the first computed from hidden itself. Each maximum is
over 32 columns of a row: the maxima are few enough to be reduced quickly, and the columns narrow
enough that a mesh can shard widths like 11008 = 32 x 344.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import int8
from coat_jax.kernels.launch import Tile, divide
from coat_jax.kernels.sharding import as_3d, launch_sharded
from coat_jax.numerics.blocks import Blocks, block_numbers, power_of_two
from coat_jax.numerics.formats import format_of
from coat_jax.numerics.noise import element_numbers
from coat_jax.precision import ForwardProducts

# The activations that the Triton kernels compute. XLA computes any other of ACTIVATIONS.
HAVE_KERNELS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")
Activation = str  # a key of ACTIVATIONS

# A new activation is one entry, as in ACTIVATIONS["swish"] = jax.nn.swish.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # CLIP's
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}

COLUMNS_PER_MAXIMUM = 32  # or a block, if that is wider
# The fastest of several choices on H200.
FORWARD, EXACT, CAST, BACKWARD = (
    Tile(32, 128, 4),
    Tile(16, 128, 4),
    Tile(32, 128, 8),
    Tile(32, 128, 8),
)


class Limited(NamedTuple):
    """An activation, and the limit of its inputs, if they have one."""

    name: Activation
    limit: float | None = None


class Constants(NamedTuple):
    """The constants of the kernels."""

    name: Activation
    limit: float | None
    gated: bool
    stochastic: bool = False
    per_maximum: int = 0  # columns of a maximum
    weighted: bool = False  # whether rows of a gradient have weights


def require_activation(name: str, limit: float | None = None) -> Limited:
    """The activation of this name with this limit; raises unless there are such."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} must be one of {tuple(ACTIVATIONS)}.")
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"{limit=} must be a finite number above 0, or None for no limit.")
    return Limited(name, None if limit is None else float(limit))


def limit_inputs(
    hidden: Sequence[Float[Array, "*rows F"]], limit: float | None
) -> list[Float[Array, "*rows F"]]:
    """gate, at most the limit, and up, from -limit to limit, in FP32."""
    values = [h.astype(jnp.float32) for h in hidden]
    if limit is None:
        return values
    return [jnp.clip(v, -limit if i else None, limit) for i, v in enumerate(values)]


def activate(hidden: Sequence[Float[Array, "*rows F"]], act: Limited) -> Float[Array, "*rows F"]:
    """act(gate) * up, or act(up), in FP32."""
    first, *gated = limit_inputs(hidden, act.limit)
    a = ACTIVATIONS[act.name](first)
    return a * gated[0] if gated else a


def activate_backward(
    hidden: Sequence[Float[Array, "*rows F"]], da: Float[Array, "*rows F"], act: Limited
) -> tuple[Float[Array, "*rows F"], ...]:
    """The gradients of `hidden`, in FP32."""
    first, *gated = used = limit_inputs(hidden, act.limit)
    da = da.astype(jnp.float32)
    a, pull = jax.vjp(ACTIVATIONS[act.name], first)
    gradients = (*pull(da * gated[0]), da * a) if gated else pull(da)
    if act.limit is None:
        return gradients
    pairs = zip(used, limit_inputs(hidden, None), strict=True)
    clipped = [(u < h) | (u > h) for u, h in pairs]  # a NaN is not
    return tuple(jnp.where(c, 0.0, d) for c, d in zip(clipped, gradients, strict=True))


def gradient_bounds(
    hidden: Sequence[Blocks], da_bound: Float[Array, "*rows"], act: Limited
) -> tuple[Float[Array, ""], ...]:
    """An upper bound of the magnitudes in the gradient of each of `hidden`.

    It is computed from the largest values that the exponents of `hidden` allow, without the codes.

    Args:
        hidden: the saved blocks.
        da_bound: an upper bound of the magnitudes in each row of the activation's gradient.
        act: the activation.
    """
    da_bound = da_bound[..., None]
    bounds = [format_of(h.codes.dtype).max * power_of_two(h.exponents) for h in hidden]
    if act.limit is not None:  # which negative gates do not have: silu is -0.28 at least
        bounds = [jnp.minimum(bound, max(act.limit, 0.28)) for bound in bounds]
    first, *gated = bounds
    value, slope = activation_bounds(first, act.name)
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
    hidden: Sequence[Float[Array, "*rows F"]] | Sequence[int8.Product],
    act: Limited,
    dtype: DTypeLike,
    size: int,
    *,
    exact: bool,
    stochastic: bool = False,
    products: ForwardProducts = "fp8",
) -> tuple[tuple[Blocks, ...], Array | None, Float[Array, "B S M"]]:
    """Blocks of `hidden`, with rows [B, S]; the activation's codes; the maxima of its magnitudes.

    The blocks are rounded to nearest, or like `to_blocks(stochastic=True)`: those of up with
    `antithetic=True`, because it is multiplied by the gate's activation.

    If not `exact`, the maxima are of the activation of the decoded blocks, and there are no codes.
    If `exact`, each maximum sets the scale of its codes: for products in FP8 a power of two, in
    INT8 the scale that maps the maximum to 127. For products in "bf16" the codes are the activation
    itself, in the dtype of hidden. A maximum then covers the activations of hidden and of its
    decoded blocks, because the backward pass recomputes the latter with the scale of the forward
    pass. Unscaled INT8 products in hidden are scaled here.
    """
    from coat_jax.kernels.triton.activation import (
        activation_forward_exact_tile,
        activation_forward_tile,
    )

    unscaled = [h for h in hidden if isinstance(h, int8.Product)]
    values = [as_3d(h.sums if isinstance(h, int8.Product) else h) for h in hidden]
    first, within = block_numbers(values[0].shape, size) if stochastic else (None, None)
    per_maximum = max(size, COLUMNS_PER_MAXIMUM)
    scales: list[tuple[Array | None, str]] = []
    if exact:
        scales = [(None, "")] * 3
    if unscaled:
        scales = [(unscaled[0].row_scale, "b s")]
        scales += [(unscaled[i].column_scale, "f") for i in (0, -1)]
    blocked = [("b s f", dtype), (f"b s f/{size}", jnp.uint8)]
    used = {"fp8": dtype, "int8": jnp.int8, "bf16": values[0].dtype}[products]
    *stored, maxima = launch_sharded(
        activation_forward_exact_tile if exact else activation_forward_tile,
        [
            (values[0], "b s f"),
            (values[1] if len(values) == 2 else None, "b s f"),
            *scales,
            (first, "b s"),
            (within, f"f/{size}"),
        ],
        [*blocked, *blocked, *[("b s f", used)] * exact, (f"b s f/{per_maximum}", jnp.float32)],
        partial(divide, tile=EXACT if exact else FORWARD, block=size),
        ACT=Constants(*act, len(values) == 2, stochastic, per_maximum),
        F8=format_of(dtype),
    )
    blocks = (Blocks(*stored[:2]), Blocks(*stored[2:4]))
    return blocks[: len(values)], stored[4] if exact else None, maxima


def activation_cast(
    hidden: Sequence[Blocks], act: Limited, scale: Float[Array, ""], size: int
) -> Array:
    """act(hidden) / scale as FP8 codes, in the blocks' format."""
    from coat_jax.kernels.triton.activation import activation_cast_tile

    dtype = hidden[0].codes.dtype
    (result,) = launch_sharded(
        activation_cast_tile,
        [*_inputs(hidden, size), (scale, "")],
        [("b s f", dtype)],
        partial(divide, tile=CAST, block=size),
        ACT=Constants(*act, len(hidden) == 2),
        F8=format_of(dtype),
    )
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
    constants: dict[str, Any] = {} if in_int8 else {"F8": format_of(codes.dtype)}
    (result,) = launch_sharded(
        int8_rescale_tile if in_int8 else activation_rescale_tile,
        [(codes, "b s f"), (maxima, f"b s f/{per_maximum}"), (scale, "b s" if in_int8 else "")],
        [("b s f", codes.dtype)],
        partial(divide, tile=CAST, block=per_maximum),
        **constants,
    )
    return result


def activation_backward(
    hidden: Sequence[Blocks],
    da: Float[Array, "*rows F"],
    act: Limited,
    scale: Float[Array, ""],
    gradient_scales: Sequence[Float[Array, ""]],
    size: int,
    dtype: DTypeLike,
    *,
    weights: Float[Array, "*rows"] | None = None,
    stochastic: bool = False,
) -> tuple[Array, list[tuple[Array, Array]], Float[Array, "B S"] | None]:
    """act(hidden) / scale as codes [F, B, S]; the gradients likewise, [B, S, F] and [F, B, S].

    Args:
        hidden: the saved blocks.
        da: the gradient of act(hidden).
        act: the activation.
        scale: of act(hidden), as in the forward pass; of act(hidden) times the weights, if there
            are any.
        gradient_scales: one for each of `hidden`.
        size: of the blocks.
        dtype: of the gradients' codes; the activation's are in the blocks' format.
        weights: with which rows are added up, for gate and up; da is then that of rows without
            their weights, and the first result is times the weights. The third is the weights'
            gradient, the products of each row of da with that of act(hidden).
        stochastic: rounds gradients and activation like `cast`, each with its own stream.
    """
    from coat_jax.kernels.triton.activation import (
        activation_backward_tile,
        activation_backward_ungated_tile,
        activation_backward_weighted_tile,
    )

    da, gated, saved = as_3d(da), len(hidden) == 2, hidden[0].codes.dtype
    weighted = weights is not None
    kernel = activation_backward_tile if gated else activation_backward_ungated_tile
    of_inputs = rows = columns = None
    if stochastic:
        of_inputs, _ = element_numbers(da.shape, "inputs")
        rows, columns = element_numbers(da.shape, "gradients")
    recomputed, *codes = launch_sharded(
        activation_backward_weighted_tile if weighted else kernel,
        [
            (da, "b s f"),
            *_inputs(hidden, size),
            (scale, ""),
            (gradient_scales[0], ""),
            (gradient_scales[-1], ""),
            (of_inputs, "b s"),
            (rows, "b s"),
            (columns, "f"),
            *[(weights, "b s")] * weighted,
        ],
        [
            ("f b s", saved),
            *[("b s f", dtype), ("f b s", dtype)] * len(hidden),
            *[(f"b s f/{max(size, BACKWARD.width)}", jnp.float32)] * weighted,
        ],
        partial(divide, tile=BACKWARD, block=size),
        ACT=Constants(*act, gated, stochastic, weighted=weighted),
        F8=format_of(saved),
        GRADIENT_F8=format_of(dtype),
    )
    dots = jnp.sum(codes.pop(), axis=-1) if weighted else None
    return recomputed, list(zip(codes[::2], codes[1::2], strict=True)), dots


def _inputs(hidden: Sequence[Blocks], size: int) -> list[tuple[Array | None, str]]:
    """The codes and exponents of gate and up; None without an up."""
    parts: list[Array | None] = [part for blocks in hidden for part in blocks]
    axes = ["b s f", f"b s f/{size}"] * 2
    return list(zip([*parts, None, None][:4], axes, strict=True))
