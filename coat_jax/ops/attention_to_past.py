"""Attention of one new token in each text to all tokens before it, for generation.

    o = softmax(q k^T / sqrt(H)) v        over the slots from `first` to before `filled`, and itself

Keys and values of these slots were stored before, in a format of `numerics.cache_formats`. They are
only read: the new token's own are given beside them, also as they are stored, so that what a token
says does not depend on when it is read. There is no backward pass.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.kernels import attention_to_past as kernels
from coat_jax.kernels.attention_to_past import Past, Visible
from coat_jax.kernels.dispatch import Implementation, choose
from coat_jax.ops.checks import require_number, require_real


def attention_to_past(
    q: Float[Array, "B 1 N H"],
    new: Past,
    visible: Visible,
    *,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B 1 N H"]:
    """Scaled dot-product attention of the newest token.

    Args:
        q: queries of N heads.
        new: codes [B, K, 1, H] of the new tokens themselves, stored in the format of the past.
        visible: the slots that they attend to. K divides N: each head of keys serves N / K query
            heads.
        scale: of the scores, 1 / sqrt(H) by default.
        implementation: "xla", which decodes all slots, "triton", or None to choose by the device.
            Heads of other widths than 64 and 128 run through XLA in each case.
    """
    require_real("attention_to_past", q)
    shapes = [tuple(jax.typeof(stored.codes).shape) for stored in (*visible.past, *new)]
    formats = [jax.tree.map(lambda x: x.dtype, stored) for stored in (*visible.past, *new)]
    fit = q.ndim == 4 and _fit(q.shape, shapes, packed=visible.past.keys.zero is not None)
    if not fit or jnp.shape(visible.first) != q.shape[:1]:
        raise ValueError(
            "attention_to_past takes q [B, 1, N, H], a past with codes [L, B, K, T, H], new ones "
            "[B, K, 1, H] and first [B], where K divides N and INT4 codes have H / 2 columns, not "
            f"{q.shape}, {shapes[:2]}, {shapes[2:]} and {jnp.shape(visible.first)}."
        )
    if any(format != formats[0] for format in formats):
        raise ValueError(
            "attention_to_past takes keys and values, past and new, that are stored in one format, "
            f"not {formats}."
        )
    if scale is None:
        scale = q.shape[3] ** -0.5
    else:
        require_number("scale", scale)
    visible = in_range(visible)
    grouped = q.reshape(q.shape[0], shapes[0][2], -1, q.shape[3])
    if choose(implementation) == "triton" and q.shape[3] in kernels.WIDTHS:
        o = kernels.add_parts(*kernels.attend_in_parts(grouped, new, visible, float(scale)))
    else:
        o = kernels.attend_reference(grouped, new, visible, float(scale))
    return o.astype(q.dtype).reshape(q.shape)


def in_range(visible: Visible) -> Visible:
    """The same slots as arrays of int32. Past the last slot there is none to read."""
    layer, first, filled = (jnp.asarray(n, jnp.int32) for n in visible[1:])
    slots = visible.past.keys.codes.shape[3]
    return Visible(visible.past, layer, first, jnp.minimum(filled, slots))


def _fit(q: tuple[int, ...], codes: list[tuple[int, ...]], *, packed: bool) -> bool:
    """Whether queries can attend to keys and values of these shapes."""
    (batch, tokens, heads, width), past = q, codes[0]
    one = (batch, past[2], 1, width // 2 if packed else width) if len(past) == 5 else ()
    fit = codes == [past, past, one, one] and (*past[1:3], 1, past[4]) == one
    return fit and tokens == 1 and past[2] > 0 and heads % past[2] == 0 and width > 0
