"""The router of a mixture of experts: which experts a token passes through, and their weights.

    scores  = softmax(logits) or sigmoid(logits)                     [T, E]
    experts = those with the k largest scores, or scores + bias      [T, k]
    weights = their scores, divided by their sum if `normalized`     [T, k]

Two penalties keep a router useful, each with a number for each row of tokens:

    balance = E sum over e of (tokens of e / tokens) * (mean score of e)      k if loads are even
    z       = mean of (log sum exp logits)^2

A bias evens out loads without a penalty: it moves the choice, but not the weights, and a step adds
a little to those of experts with few tokens. All is in FP32. Saved for the backward pass is the
input, in FP8 blocks or as it is.
"""

import operator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from coat_jax.errors import UserError
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs
from coat_jax.ops import recording
from coat_jax.ops.checks import require_real
from coat_jax.ops.definition import SavedArray, define_op, restore, save_array
from coat_jax.ops.projection import Mode
from coat_jax.precision import COAT, Precision, precision_of

Scores = Literal["softmax", "sigmoid"]
FUNCTIONS: dict[str, Any] = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


def router_logits(
    x: Float[Array, "*rows D"], router: Float[Array, "D E"], *, precision: Precision | str = COAT
) -> Float[Array, "*rows E"]:
    """x router, in FP32.

    Args:
        x: the tokens.
        router: the weight, with a column for each expert.
        precision: only its `block`, `forward` and `stochastic` matter here: how x is saved.
    """
    require_real("router_logits", x, least_rank=1)
    return _logits(Mode(precision_of(precision), "xla"), (x.dtype,), x, router)


def _forward(mode: Mode, dtype: Any, x: Array, router: Array) -> Any:
    del dtype
    # The forward pass always computes with x itself.
    block, forward = mode.precision.block, mode.precision.forward
    saved = save_array(x, forward, block, stochastic=mode.precision.stochastic)
    record = partial(recording.blocks, ("saved",), (x,), (saved,), block, forward)
    return _dot(x, router), (saved, router), record


def _backward(mode: Mode, dtype: Any, saved: SavedArray, router: Array, dy: Array) -> Any:
    x = restore(saved, jnp.float32, mode.precision.block)
    rows = tuple(range(x.ndim - 1))
    d_router = jnp.tensordot(x, dy, (rows, rows), precision=lax.Precision.HIGHEST)
    return (_dot(dy, router.T).astype(dtype), d_router.astype(router.dtype)), dict


def _dot(x: Array, weight: Array) -> Array:
    # A GPU's default precision of FP32 products is TF32.
    x, weight = (a.astype(jnp.float32) for a in (x, weight))
    return jnp.matmul(x, weight, precision=lax.Precision.HIGHEST)


def _specs(dtype: Any, x: Array, router: Array) -> PartitionSpec:
    del dtype
    return merge_specs(*explicit_spec(x)[:-1], explicit_spec(router)[-1])


_logits = define_op("router_logits", _forward, _backward, blocks=("saved",), specs=_specs)


def route(
    logits: Float[Array, "*rows E"],
    chosen: int,
    *,
    scores: Scores = "softmax",
    normalized: bool,
    bias: Float[Array, " E"] | None = None,
) -> tuple[Int[Array, "*rows k"], Float[Array, "*rows k"]]:
    """The experts of each token, and their weights.

    Args:
        logits: from `router_logits`.
        chosen: how many experts a token has, k.
        scores: how logits become scores.
        normalized: whether the weights of a token add up to 1.
        bias: is added to the scores that decide which experts are chosen.
    """
    if not 1 <= (chosen := operator.index(chosen)) <= logits.shape[-1]:
        raise UserError(
            f"chosen={chosen}: a token has from 1 to {logits.shape[-1]} experts, as many as there "
            "are logits."
        )
    of_all = ranks = _scores(logits, scores)
    if bias is not None:
        ranks = of_all + jnp.broadcast_to(bias.astype(jnp.float32), of_all.shape)
    experts = lax.top_k(lax.stop_gradient(ranks), chosen)[1]
    weights = jnp.take_along_axis(of_all, experts, axis=-1)
    if normalized:
        weights = _divided_by_sum(weights)
    return experts, weights


def expert_load(
    experts: Int[Array, "*B S k"], count: int, counted: Bool[Array, "*B S"] | None = None
) -> Float[Array, "*B E"]:
    """How many tokens of each row every expert has.

    Args:
        experts: from `route`.
        count: how many experts there are.
        counted: which tokens count, those that are not 0; all by default. Padding should not.
    """
    return jnp.sum(_chosen(experts, count) * _weight(experts, counted), axis=-2)


def balance_loss(
    logits: Float[Array, "*B S E"],
    experts: Int[Array, "*B S k"],
    *,
    scores: Scores = "softmax",
    counted: Bool[Array, "*B S"] | None = None,
) -> Float[Array, "*B"]:
    """The balance of each row: Switch Transformer's loss, as transformers computes it.

    Args:
        logits: from `router_logits`.
        experts: from `route`.
        scores: what `route` ranked; sigmoids are divided by their sum here.
        counted: see `expert_load`.
    """
    count, of_all = logits.shape[-1], _scores(logits, scores)
    if scores == "sigmoid":
        of_all = _divided_by_sum(of_all)
    weight = _weight(experts, counted)
    shares, means = _mean(_chosen(experts, count), weight), _mean(of_all, weight)
    return count * jnp.sum(shares * means, axis=-1)


def router_z_loss(
    logits: Float[Array, "*B S E"], counted: Bool[Array, "*B S"] | None = None
) -> Float[Array, "*B"]:
    """The mean squared log-sum-exp of each row; for `counted` see `expert_load`."""
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return _mean(squares, _weight(logits, counted))[..., 0]


def _scores(logits: Float[Array, "*rows E"], scores: Scores) -> Float[Array, "*rows E"]:
    if scores not in FUNCTIONS:
        raise ValueError(f"scores={scores!r} must be one of {', '.join(FUNCTIONS)}.")
    found: Array = FUNCTIONS[scores](logits.astype(jnp.float32))
    return found


def _divided_by_sum(scores: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
    # All sigmoids may be 0. The square of the least sum, in the gradient, must not be.
    return scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), 1e-12)


def _chosen(experts: Int[Array, "*rows k"], count: int) -> Float[Array, "*rows E"]:
    """1 for each expert of a token, 0 for others."""
    return jnp.sum(jax.nn.one_hot(experts, count, dtype=jnp.float32), axis=-2)


def _weight(
    of_tokens: Shaped[Array, "*B S K"], counted: Bool[Array, "*B S"] | None
) -> Float[Array, "*B S 1"]:
    """1 for tokens that count, 0 for others."""
    if counted is None:
        return jnp.ones((*of_tokens.shape[:-1], 1), jnp.float32)
    if counted.shape != of_tokens.shape[:-1]:
        raise ValueError(f"counted {counted.shape} must be {of_tokens.shape[:-1]}, as the tokens.")
    return counted[..., None].astype(bool).astype(jnp.float32)


def _mean(x: Float[Array, "*B S K"], weight: Float[Array, "*B S 1"]) -> Float[Array, "*B K"]:
    """The mean over the tokens of each row that count; 0 where none does."""
    return jnp.sum(x * weight, axis=-2) / jnp.maximum(jnp.sum(weight, axis=-2), 1)
