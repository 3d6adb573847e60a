"""Attention of one new token to a stored past: what `ops.attention_to_past` computes with.

    o = sum_i w_i o_i / sum_i w_i        w_i = 2^log_sums_i

over parts i of the slots, so that few texts and heads occupy a whole GPU, too. The kernel computes
o_i of the parts and the base-2 logarithms of their sums of exponentials. They are added up
afterwards, always in the same order.

The kernel reads the keys and values of all layers: to slice out those of one, XLA would copy them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from coat_jax.kernels.sharding import launch_sharded
from coat_jax.numerics.cache_formats import StoredHeads, decode_heads

WIDTHS = (64, 128)  # of heads, in the kernel
LOG2_E = 1.4426950408889634
LEAST = 128  # slots of a part: adding up many short parts takes as long as they do
PROGRAMS = 512  # at least, where there are enough slots: about 4 for each processor of an H200

CODES, SCALE = "!l b k !t !c", "!l b k !t"
OWN_CODES, OWN_SCALE = "b k !one !c", "b k !one"


class Past(NamedTuple):
    """Stored keys and values as attention reads them: normalized, rotated and rounded."""

    keys: StoredHeads
    values: StoredHeads


class Visible(NamedTuple):
    """The slots that new tokens attend to, besides themselves.

    Attributes:
        past: codes [L, B, K, T, H], of L layers and T slots.
        layer: the one whose past is read.
        first: the first slot that each new token attends to.
        filled: how many slots are taken, from the first on. Later ones are not read.
    """

    past: Past
    layer: Int32[Array, ""]
    first: Int32[Array, " B"]
    filled: Int32[Array, ""]


class Loop(NamedTuple):
    """How a program reads its slots."""

    block: int  # slots of a step
    warps: int
    stages: int


class Spec(NamedTuple):
    """The constants of the kernel."""

    parts: int
    samples: int  # texts x KV heads
    heads: int  # for keys and values
    group: int  # of query heads that share a KV head
    rows: int  # group, and empty ones
    width: int  # of a head
    slots: int
    block: int
    stages: int
    scaled: bool  # whether codes have a scale
    packed: bool  # whether a byte has two codes, and codes have a zero point
    integers: bool  # whether codes are
    factor: float  # of q k, so that 2^(q k factor) is proportional to probabilities


def attend_in_parts(
    q: Float[Array, "B K G H"], new: Past, visible: Visible, scale: float
) -> tuple[Float[Array, "B K P G H"], Float[Array, "B K P G"]]:
    """o of each part, and the base-2 logarithm of its sum of exponentials."""
    from coat_jax.kernels.triton.attention_to_past import attend_to_past

    past, layer, first, filled = visible
    slots = past.keys.codes.shape[3]
    samples = q.shape[0] * q.shape[1]
    parts = min(-(-PROGRAMS // samples), -(-slots // LEAST))
    block, warps, stages = loop_of(samples, q.shape[2])

    def grid(q: Array, *others: Array) -> dict[str, Any]:
        del others
        batch, heads, group, width = q.shape
        rows = max(16, 1 << (group - 1).bit_length())
        has = past.keys.scale is not None, past.keys.zero is not None
        integers = jnp.issubdtype(past.keys.codes.dtype, jnp.integer)
        spec = Spec(
            *(parts, batch * heads, heads, group, rows, width, slots, block, stages),
            *(*has, integers, scale * LOG2_E),
        )
        return {"programs": batch * heads * parts, "warps": warps, "stages": stages, "SPEC": spec}

    stored = [zip(of, (CODES, SCALE, SCALE), strict=True) for of in past]
    own = [zip(of, (OWN_CODES, OWN_SCALE, OWN_SCALE), strict=True) for of in new]
    o, log_sums = launch_sharded(
        attend_to_past,
        [
            *((q, "b k !g !h"), *stored[0], *stored[1], *own[0], *own[1]),
            *((layer, ""), (first, "b"), (filled, "")),
        ],
        [("b k !p !g !h", jnp.float32), ("b k !p !g", jnp.float32)],
        grid,
        {"p": parts},
    )
    return o, log_sums


def loop_of(samples: int, group: int) -> Loop:
    """The fastest of those tried on an H200. Many programs hide each other's latency."""
    if samples <= PROGRAMS:
        return Loop(64, 4, 3)
    return Loop(32, 2, 3) if group == 1 else Loop(64, 4, 2)


def add_parts(
    o: Float[Array, "B K P G H"], log_sums: Float[Array, "B K P G"]
) -> Float[Array, "B K G H"]:
    """o of all parts together."""
    weights = jnp.exp2(log_sums - jnp.max(log_sums, axis=2, keepdims=True))
    return jnp.sum(weights[..., None] * o, axis=2) / jnp.sum(weights, axis=2)[..., None]


def attend_reference(
    q: Float[Array, "B K G H"], new: Past, visible: Visible, scale: float
) -> Float[Array, "B K G H"]:
    """Attention as one softmax."""
    past, layer, first, filled = visible
    wide = {"preferred_element_type": jnp.float32}
    of_layer = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), past)
    k, v = (decode_heads(stored, q.dtype) for stored in of_layer)
    own_key, own_value = (decode_heads(stored, q.dtype) for stored in new)
    slots = jnp.arange(k.shape[2])
    seen = (slots >= first[:, None]) & (slots < filled)
    x, own = (jnp.einsum("bkgh,bkth->bkgt", q, keys, **wide) for keys in (k, own_key))
    x = jnp.concatenate([jnp.where(seen[:, None, None], x, -jnp.inf), own], axis=-1)
    p = jax.nn.softmax(x * scale, axis=-1).astype(q.dtype)
    shares = (p[..., :-1], v), (p[..., -1:], own_value)
    o, own = (jnp.einsum("bkgt,bkth->bkgh", *each, **wide) for each in shares)
    return o + own
