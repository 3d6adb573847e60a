"""One step of AdamW whose moments live in expanded FP8: decode, update, encode.

    m = b1 m + (1 - b1) g                        v = b2 v + (1 - b2) g^2
    d = m / (1 - b1^t) / (sqrt(v / (1 - b2^t) + eps_root) + eps)
    p = p - learning_rate (d + weight_decay p)

`adam_reference` is this in `jnp`, one leaf at a time: the specification, and what runs through
XLA. The Triton kernel does it in one pass over memory and in place: 14.2 bytes moved per FP32
parameter with BF16 gradients. Without a parameter a leaf's result is its direction d, for the
links of an optax chain that follow.

The kernel's results differ from the reference's by the rounding of its approximate
logarithms, powers and roots; a stored code may differ by one where a value lies on the edge.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from coat_jax import noise
from coat_jax.expansion import Expanded
from coat_jax.kernels.expansion import (
    copysign,
    decode,
    decode_scale,
    expand,
    fit,
    mix,
    one_plus_noise,
    reciprocal,
    representable,
    round_stochastically,
    sqrt,
)
from coat_jax.kernels.launch import kernel
from coat_jax.moments import Storage

if TYPE_CHECKING:
    import triton.language as tl


Number = float | Array


class Hyper(NamedTuple):
    """The numbers of a step: Python floats, or scalars computed in the program."""

    learning_rate: Number = 0.0
    b1: Number = 0.9
    b2: Number = 0.999
    eps: Number = 1e-8
    eps_root: Number = 0.0
    weight_decay: Number = 0.0
    grad_scale: Number = 1.0  # multiplies the gradients: clipping, loss scaling
    skip: bool | Array = False  # where true, the step changes nothing


class Leaf(NamedTuple):
    """The arrays of one leaf; `param` is None where only the direction is wanted."""

    param: Float[Array, ...] | None
    grad: Float[Array, ...]
    mu: Expanded
    nu: Expanded


class Stepped(NamedTuple):
    """The results for one leaf: the new parameter, or the direction; and the new moments."""

    result: Float[Array, ...]
    mu: Expanded
    nu: Expanded


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when a step is compiled."""

    storage: Storage = Storage()
    nesterov: bool = False
    round_params: bool = False  # BF16 parameters rounded stochastically


def adam_reference(
    leaf: Leaf,
    count: Int[Array, ""],
    hyper: Hyper,
    settings: Settings,
    index: int,
    decayed: bool = True,
) -> Stepped:
    """Steps the leaf at place `index` of the tree."""
    storage = settings.storage
    m, v = storage.read(leaf.mu), storage.read(leaf.nu)
    m, v, direction = adam_update(m, v, leaf.grad, count, hyper, nesterov=settings.nesterov)

    key = noise.leaf_key(storage.seed, count, index)
    if leaf.param is None:
        result = direction.astype(leaf.grad.dtype)
    else:
        param = leaf.param.astype(jnp.float32)
        if decayed:
            direction = direction + hyper.weight_decay * param
        result = param + -hyper.learning_rate * direction
        if settings.round_params and leaf.param.dtype == jnp.bfloat16:
            result = noise.round_to_bfloat16(result, noise.param_key(key), run=storage.group_size)
        result = result.astype(leaf.param.dtype)

    dither = None
    if storage.stochastic:
        dither = noise.uniform(key, v.shape, run=storage.group_size)
    stepped = Stepped(
        result, storage.write(m, storage.first), storage.write(v, storage.second, dither)
    )
    if hyper.skip is False:
        return stepped
    before = Stepped(result if leaf.param is None else leaf.param, leaf.mu, leaf.nu)
    return jax.tree.map(lambda old, new: jnp.where(hyper.skip, old, new), before, stepped)


def adam_update(
    m: Float[Array, ...],
    v: Float[Array, ...],
    grad: Float[Array, ...],
    count: Int[Array, ""],
    hyper: Hyper,
    *,
    nesterov: bool,
) -> tuple[Float[Array, ...], Float[Array, ...], Float[Array, ...]]:
    """Returns the new moments and the direction, in FP32."""
    _, b1, b2, eps, eps_root, _, grad_scale, _ = hyper
    grad = grad.astype(jnp.float32) * grad_scale
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * jnp.square(grad)
    debias1, debias2 = bias(b1, count), bias(b2, count)
    m_hat = m / debias1
    if nesterov:
        m_hat = b1 * m / bias(b1, count + 1) + (1 - b1) * grad / debias1
    return m, v, m_hat / (jnp.sqrt(v / debias2 + eps_root) + eps)


def bias(decay: Number, count: Int[Array, ""]) -> Float[Array, ""]:
    """1 - decay^count, without cancellation for decay near 1."""
    return -jnp.expm1(count.astype(jnp.float32) * log_decay(decay))


def log_decay(decay: Number) -> Number:
    if isinstance(decay, int | float):
        return math.log(decay) if decay > 0 else -math.inf
    return jnp.log(decay)


# --- The kernel ------------------------------------------------------------------------------


def numbers_of_step(
    count: Int[Array, ""], hyper: Hyper, *, nesterov: bool, has_param: bool
) -> Float[Array, 11]:
    """What the kernel multiplies by, the same for all elements: computed once, by XLA."""
    lr, b1, b2, eps, eps_root, weight_decay, grad_scale, skip = hyper
    debias1, debias2 = bias(b1, count), bias(b2, count)
    from_m, from_grad = 1 / debias1, jnp.zeros([])
    if nesterov:
        from_m, from_grad = b1 / bias(b1, count + 1), (1 - b1) * grad_scale / debias1
    sign = -lr if has_param else 1.0
    numbers = [
        b1,  # 0, 1: of the first moment and the gradient
        (1 - b1) * grad_scale,
        b2,  # 2, 3: of the second moment and the squared gradient
        (1 - b2) * grad_scale * grad_scale,
        jax.lax.rsqrt(debias2),  # 4 - 6: sqrt(v + [6]) * [4] + [5] divides
        eps,
        eps_root * debias2,
        sign * from_m,  # 7, 8: what is divided
        sign * from_grad,
        lr * weight_decay,  # 9
        skip,  # 10: whether nothing is stored
    ]
    return jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])


# A program steps one block of one leaf: some groups of neighbours. `numbers` are those above,
# `keys` one noise.leaf_key per leaf, `layout` a row of adam_launch's table: where the leaf's
# blocks begin and so on.


@kernel
def step_block(
    block,
    numbers,
    keys,
    layout,
    param,
    grad,
    mu_codes,
    mu_amax,
    mu_k16,
    nu_codes,
    nu_amax,
    nu_k16,
    result,
    mu_codes_out,
    mu_amax_out,
    mu_k16_out,
    nu_codes_out,
    nu_amax_out,
    nu_k16_out,
    GROUP: tl.constexpr,
    GROUPS_PER_BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    FULL: tl.constexpr,
    JUMPS: tl.constexpr,
    HAS_PARAM: tl.constexpr,
    NESTEROV: tl.constexpr,
    EPS_ROOT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROUND_PARAM: tl.constexpr,
    MAY_SKIP: tl.constexpr,
    MU: tl.constexpr,
    NU: tl.constexpr,
    FAST: tl.constexpr,
):
    # Where the block's groups are.
    lane = tl.arange(0, GROUP)
    first = (block - tl.load(layout)) * GROUPS_PER_BLOCK
    group = first + tl.arange(0, GROUPS_PER_BLOCK)
    exists = group < tl.load(layout + 1)
    if WHOLE:
        start = first.to(tl.int64) * GROUP
        at = tl.arange(0, GROUPS_PER_BLOCK)[:, None] * GROUP + lane[None, :]
        here = exists[:, None] & (lane < GROUP)[None, :]
    else:
        groups_per_row = tl.load(layout + 2)
        columns = tl.load(layout + 3)
        column = (group % groups_per_row) * GROUP
        start = tl.zeros([], tl.int64)
        at = (group // groups_per_row).to(tl.int64) * columns + column
        at = at[:, None] + lane[None, :]
        here = exists[:, None] & (column[:, None] + lane[None, :] < columns)
    if FULL:  # Every block is: no masks.
        exists = tl.full([GROUPS_PER_BLOCK], 1, tl.int1)
        here = tl.full([GROUPS_PER_BLOCK, GROUP], 1, tl.int1)

    # Decode and update. Factors common to a group or to the step are multiplied first.
    g = tl.load(grad + start + at, mask=here, other=0.0).to(tl.float32)
    mu = tl.load(mu_codes + start + at, mask=here, other=0.0).to(tl.float32)
    nu = tl.load(nu_codes + start + at, mask=here, other=0.0).to(tl.float32)
    if HAS_PARAM:
        p = tl.load(param + start + at, mask=here, other=0.0).to(tl.float32)
    mu_scale, mu_root = decode_scale(
        tl.load(mu_amax + group, mask=exists, other=0.0),
        tl.load(mu_k16 + group, mask=exists, other=16),
        MU[0],
        FAST,
    )
    nu_scale, nu_root = decode_scale(
        tl.load(nu_amax + group, mask=exists, other=0.0),
        tl.load(nu_k16 + group, mask=exists, other=16),
        NU[0],
        FAST,
    )
    m = (tl.load(numbers) * mu_scale)[:, None] * copysign(decode(mu, mu_root, FAST), mu)
    m += tl.load(numbers + 1) * g
    v = (tl.load(numbers + 2) * nu_scale)[:, None] * decode(nu, nu_root, FAST)
    v += tl.load(numbers + 3) * (g * g)

    if MAY_SKIP:  # What is not stored stays: the step is in place.
        skipped = tl.load(numbers + 10) != 0.0
        exists = tl.where(skipped, False, exists)
        here = tl.where(skipped, False, here)

    # The direction, or the new parameter.
    spread = v
    if EPS_ROOT:
        spread += tl.load(numbers + 6)
    spread = sqrt(spread, FAST) * tl.load(numbers + 4) + tl.load(numbers + 5)
    moved = m * tl.load(numbers + 7)
    if NESTEROV:
        moved += g * tl.load(numbers + 8)
    moved *= reciprocal(spread, FAST)
    key = tl.load(keys + tl.load(layout + 4))
    run = group + tl.load(layout + 6)
    for jump in tl.static_range(JUMPS):
        run += (group // tl.load(layout + 7 + 2 * jump)) * tl.load(layout + 8 + 2 * jump)
    run = run.to(tl.uint32)
    if HAS_PARAM:
        shrink = 1.0 - tl.load(numbers + 9) * tl.load(layout + 5).to(tl.float32)
        moved += p * shrink
        if ROUND_PARAM:
            u = one_plus_noise(mix(key ^ 0x5BD1E995), run, GROUP).to(tl.uint32, bitcast=True)
            bits = moved.to(tl.uint32, bitcast=True) + ((u >> 7) & 0xFFFF)
            rounded = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
            moved = tl.where(moved == moved, rounded, moved)  # noqa: PLR0124, NaN stays NaN
    tl.store(result + start + at, moved.to(result.dtype.element_ty), mask=here)

    # Encode.
    amax, log2_amax, k16 = fit(tl.abs(m), MU[1], MU[6], FAST)
    image = expand(tl.abs(m), log2_amax, k16, MU[0], MU[2], FAST)
    image = copysign(representable(image, MU[3], MU[4], MU[5], FAST), m)
    tl.store(mu_codes_out + start + at, image.to(mu_codes_out.dtype.element_ty), mask=here)
    tl.store(mu_amax_out + group, amax, mask=exists)
    tl.store(mu_k16_out + group, k16.to(tl.uint8), mask=exists)
    amax, log2_amax, k16 = fit(v, NU[1], NU[6], FAST)
    image = expand(v, log2_amax, k16, NU[0], NU[2], FAST)
    if STOCHASTIC:
        u = one_plus_noise(key, run, GROUP)
        image = round_stochastically(image, u, k16, NU[4], NU[5], FAST)
    image = representable(image, NU[3], NU[4], NU[5], FAST)
    tl.store(nu_codes_out + start + at, image.to(nu_codes_out.dtype.element_ty), mask=here)
    tl.store(nu_amax_out + group, amax, mask=exists)
    tl.store(nu_k16_out + group, k16.to(tl.uint8), mask=exists)
