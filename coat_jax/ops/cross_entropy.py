"""The loss of a language model, from hidden states to one number, without the full logits.

    logits = h w                                     [B, S, V]: never more than a chunk of S
    loss   = mean over labelled tokens of  (1 - s) (lse - logit of the label)
                                           + s (lse - mean of the logits)  +  z lse^2

The sequence is split into chunks; each chunk's logits are FP32 and are recomputed in the
backward pass. The forward pass saves h, w and one log-sum-exp per token. Products are in the dtype
of h, and summed in FP32. They are not in FP8, which would harm the head more than any other layer.

On a mesh only scalars are communicated within the loop over chunks: w is gathered before the loop.
Each device sums the gradient of w over its own rows, and the sums are reduced after the loop.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from coat_jax.numerics.explicit_axes import shard_inside
from coat_jax.numerics.mesh_axes import automatic_mesh
from coat_jax.ops.checks import require_number, require_real
from coat_jax.ops.embedding import in_int32
from coat_jax.ops.projection import as_layers

IGNORED = -100


def cross_entropy(
    hidden: Float[Array, "*B S D"],
    weight: Float[Array, "D V"],
    labels: Int[Array, "*B S"],
    *,
    chunk: int = 512,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> Float[Array, ""]:
    """The mean loss over the tokens that have a label.

    Args:
        hidden: the input of the head, of any leading shape.
        weight: the head.
        labels: the correct token at each position. Negative labels (-100) do not count. A label of
            V or more makes the loss NaN.
        chunk: positions along S whose logits are in memory at the same time.
        z_loss: weight of the squared log-sum-exp, which keeps logits from drifting.
        label_smoothing: the share of the label's probability that is spread over all tokens.
    """
    total = cross_entropy_sum(
        hidden, weight, labels, chunk=chunk, z_loss=z_loss, label_smoothing=label_smoothing
    )
    return total / jnp.maximum(jnp.sum(labels >= 0), 1).astype(total.dtype)


def cross_entropy_sum(
    hidden: Float[Array, "*B S D"],
    weight: Float[Array, "D V"],
    labels: Int[Array, "*B S"],
    *,
    chunk: int = 512,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> Float[Array, ""]:
    """The sum of the losses that `cross_entropy` takes the mean of; see there."""
    require_real("cross_entropy", hidden, least_rank=1)
    as_layers("cross_entropy", hidden.shape[-1], (weight,), None)
    labels = in_int32("labels", labels)
    if hidden.ndim < 2 or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels {labels.shape} must be one per row of hidden {hidden.shape[:-1]}, which needs "
            "a sequence axis."
        )
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f"chunk={chunk!r} must be a positive whole number.")
    require_number("z_loss", z_loss)
    require_number("label_smoothing", label_smoothing)
    if z_loss < 0 or not 0 <= label_smoothing < 1:
        raise ValueError(
            f"{z_loss=} must be at least 0, and {label_smoothing=} at least 0 and under 1."
        )
    chunk = max(min(chunk, hidden.shape[-2]), 1)
    settings = _LossSettings(chunk, float(z_loss), float(label_smoothing))
    op = partial(_sum_of_losses, settings)
    return shard_inside(op, PartitionSpec, hidden, weight, labels)


class _LossSettings(NamedTuple):
    chunk: int
    z_loss: float
    smoothing: float


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_losses(settings: _LossSettings, hidden: Array, weight: Array, labels: Array) -> Array:
    return _forward(settings, hidden, weight, labels)[0]


def _forward(settings: _LossSettings, hidden: Array, weight: Array, labels: Array) -> Any:
    w = _gather(weight.astype(hidden.dtype))

    def one(total: Array, part: tuple[Array, Array]) -> tuple[Array, Array]:
        h, y = part
        logits = _dot_in_fp32(h, w, 1)
        lse = jax.nn.logsumexp(logits, axis=-1)
        label = jnp.take_along_axis(logits, jnp.maximum(y, 0)[..., None], axis=-1)[..., 0]
        s = settings.smoothing
        loss = lse - (1 - s) * label + settings.z_loss * jnp.square(lse)
        if s:
            loss = loss - s * jnp.mean(logits, axis=-1)
        return total + jnp.sum(jnp.where(y >= 0, loss, 0.0)), lse

    parts = _chunks(hidden, settings.chunk, -2, 0), _chunks(labels, settings.chunk, -1, IGNORED)
    total, lse = lax.scan(one, jnp.zeros([], jnp.float32), parts)
    return total, (hidden, weight, labels, lse)


def _backward(settings: _LossSettings, residuals: Any, gradient: Array) -> Any:
    hidden, weight, labels, lse = residuals
    w = _gather(weight.astype(hidden.dtype))
    vocabulary = weight.shape[-1]
    # Rows are summed in groups, none of which two devices share. Which devices hold which rows is
    # not known while tracing, so the number of groups divides both the mesh and the first axis.
    mesh = automatic_mesh()
    groups = math.gcd(mesh.size, hidden.shape[0]) if mesh and hidden.ndim > 2 else 1
    rows = tuple(range(hidden.ndim - 1))
    sum_products = jax.vmap(partial(_dot_in_fp32, axes=(rows, rows)))

    def one(dw: Array, part: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        h, y, lse = part
        probability = jnp.exp(_dot_in_fp32(h, w, 1) - lse[..., None])
        s = settings.smoothing
        d_logits = probability * (1 + 2 * settings.z_loss * lse[..., None])
        wanted = jax.nn.one_hot(y, vocabulary, dtype=jnp.float32)
        d_logits = d_logits - (1 - s) * wanted - s / vocabulary
        d_logits = jnp.where(y[..., None] >= 0, d_logits * gradient, 0.0).astype(h.dtype)
        dh = lax.dot_general(d_logits, w, (((h.ndim - 1,), (1,)), ((), ())))
        in_groups = (x.reshape(groups, x.shape[0] // groups, *x.shape[1:]) for x in (h, d_logits))
        return dw + sum_products(*in_groups), dh

    parts = _chunks(hidden, settings.chunk, -2, 0), _chunks(labels, settings.chunk, -1, IGNORED)
    dw = jnp.zeros((groups, *weight.shape), jnp.float32)
    dw, dh = lax.scan(one, dw, (*parts, lse))
    # In the weight's dtype, so that devices exchange no more bytes than the weight has.
    dw = lax.reduce(dw.astype(weight.dtype), jnp.zeros([], weight.dtype), lax.add, (0,))
    dh = jnp.moveaxis(dh, 0, -3)
    dh = dh.reshape(*hidden.shape[:-2], math.prod(dh.shape[-3:-1]), hidden.shape[-1])
    return dh[..., : hidden.shape[-2], :], dw, None  # without padding


_sum_of_losses.defvjp(_forward, _backward)


def _gather(w: Float[Array, "D V"]) -> Float[Array, "D V"]:
    """`w` with all its rows on every device; its columns stay sharded as they are."""
    if automatic_mesh() is None:
        return w
    return lax.with_sharding_constraint(w, PartitionSpec(None, PartitionSpec.UNCONSTRAINED))


def _dot_in_fp32(a: Array, b: Array, axes: Any) -> Array:
    """`jnp.tensordot` of arrays in their own dtypes, with sums and result in FP32."""
    dot = partial(jnp.tensordot, axes=axes, preferred_element_type=jnp.float32)
    # XLA's CPU backend compiles BF16 products in some layouts that it then cannot run.
    return lax.platform_dependent(
        a, b, cpu=lambda *ab: dot(*(x.astype(jnp.float32) for x in ab)), default=dot
    )


def _chunks(x: Array, chunk: int, axis: int, fill: int) -> Array:
    """Splits the sequence axis into chunks, which become the first axis; pads the last one."""
    axis %= x.ndim
    missing = -x.shape[axis] % chunk
    if missing:
        padding = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, padding, constant_values=fill)
    shape = (*x.shape[:axis], x.shape[axis] // chunk, chunk, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)
