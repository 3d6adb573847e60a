"""Layers in INT4 for one new token of few texts, with one launch between two products.

They compute what `nn.ModularGatedMLP` and `nn.ModularAttention` do, but stay in FP32 where those
round to the dtype of x.
"""

from collections.abc import Sequence

from jaxtyping import Array, Float, Int

from coat_jax.kernels import attention_to_past, few_rows, int4
from coat_jax.kernels.activation import Limited
from coat_jax.kernels.attention_to_past import Past, Visible
from coat_jax.kernels.dispatch import Implementation, choose
from coat_jax.kernels.norm import Norm
from coat_jax.numerics.cache_formats import format_of_cache
from coat_jax.ops.attention_to_past import in_range
from coat_jax.ops.quantized import Activations, Quantized, without_gradient
from coat_jax.ops.rotary import Rotary


def runs(
    x: Float[Array, "*rows D"],
    weights: Sequence[Quantized],
    activations: Sequence[Activations],
    implementation: Implementation | None = None,
) -> bool:
    """Whether layers of these weights, the last of which follows the others, run by the kernels."""
    in_int4 = all(weight.format == "int4" for weight in weights)
    if choose(implementation) != "triton" or not in_int4 or {*activations} != {"dynamic"}:
        return False
    together = int4.share_a_launch([weight.in_int4() for weight in weights[:-1]])
    columns = x.shape[-1], 2 * weights[-1].codes.shape[1]
    return together and few_rows.fits(x.size // max(x.shape[-1], 1), *columns)


def gated_mlp(
    x: Float[Array, "*rows D"],
    norm: Norm | None,
    weights: Sequence[Quantized],
    biases: Sequence[Float[Array, " N"] | None],
    act: Limited,
    *,
    residual: bool,
) -> Float[Array, "*rows D"]:
    """x + (act(norm(x) gate) * (norm(x) up)) down.

    Args:
        x: the input, few rows.
        norm: the norm before the products, or None.
        weights: gate, up and down.
        biases: theirs.
        act: an activation that has a kernel.
        residual: whether x is added to the result.
    """
    gate, up = _products(few_rows.normalize(_as_rows(x), norm), weights[:2], biases[:2])
    hidden = few_rows.activate(gate, up, act)
    return _last(hidden, weights[2], biases[2], x, residual)


def attention(
    x: Float[Array, "B 1 D"],
    norm: Norm | None,
    weights: Sequence[Quantized],
    biases: Sequence[Float[Array, " N"] | None],
    rotary: Rotary,
    positions: Int[Array, "B 1"],
    visible: Visible,
    *,
    residual: bool,
) -> tuple[Float[Array, "B 1 D"], Past]:
    """Attention of one new token of each text, and its keys and values.

    Args:
        x: the input.
        norm: the norm before the products, or None.
        weights: query, key, value and out.
        biases: theirs.
        rotary: how queries and keys are rotated.
        positions: of the tokens.
        visible: the slots that they attend to.
        residual: whether x is added to the result.
    """
    keys = visible.past.keys
    width, kv_heads = _head_width(visible.past), keys.codes.shape[2]
    products = _products(few_rows.normalize(_as_rows(x), norm), weights[:3], biases[:3])
    angles = rotary.cos_sin(positions[:, 0], width)
    q, new = few_rows.store_heads(products, *angles, format_of_cache(keys), x.dtype)
    grouped = q.reshape(x.shape[0], kv_heads, -1, width)
    parts = attention_to_past.attend_in_parts(grouped, new, in_range(visible), width**-0.5)
    return _last(few_rows.combine(*parts), weights[3], biases[3], x, residual), new


def has_kernels(past: Past) -> bool:
    """Whether heads of this width have kernels."""
    return _head_width(past) in attention_to_past.WIDTHS


def _as_rows(x: Float[Array, "*rows D"]) -> Float[Array, "M D"]:
    return without_gradient(x).reshape(-1, x.shape[-1])


def _products(
    x: int4.Rows, weights: Sequence[Quantized], biases: Sequence[Float[Array, " N"] | None]
) -> list[int4.Product]:
    products = int4.products_of_few_rows(x, [weight.in_int4() for weight in weights])
    return [
        product if bias is None else product.plus(bias)
        for product, bias in zip(products, biases, strict=True)
    ]


def _last(
    hidden: int4.Rows,
    weight: Quantized,
    bias: Float[Array, " N"] | None,
    x: Float[Array, "*rows D"],
    residual: bool,
) -> Float[Array, "*rows D"]:
    if residual and bias is None and hidden.scale.size <= int4.ADDED_ROWS:
        y = int4.add_product(_as_rows(x), hidden, weight.in_int4())
    else:
        (product,) = _products(hidden, [weight], [bias])
        y = product.added_to(_as_rows(x)) if residual else product.total().astype(x.dtype)
    return y.reshape(*x.shape[:-1], -1)


def _head_width(past: Past) -> int:
    return past.keys.codes.shape[-1] * (1 if past.keys.zero is None else 2)
