"""One step of AdamW whose moments are stored in 8 bits: decode, update, encode.

    g = clip(grad_scale g, 2^63)                 whose square is finite in FP32
    m = b1 m + (1 - b1) g                        v = b2 v + (1 - b2) g^2
    d = m / (1 - b1^t) / (sqrt(max(v, b2 s) / (1 - b2^t) + eps_root) + eps)
    d = clip(d, largest_direction)               what exact moments could give at most
    p = p - learning_rate (d + weight_decay p)

s is the smallest second moment that the element's group can hold, about amax 2^-36. A smaller one
may have been rounded to zero, so its root says nothing; the step is then too small, not too large.

`adam_reference` is this in `jnp`, one leaf at a time: the specification, and what runs through
XLA. The Triton kernel does it in one pass over memory and in place: 14.2 bytes moved per FP32
parameter with BF16 gradients. Without a parameter a leaf's result is its direction d, for the
links of an optax chain that follow. Results of kernel and reference differ by the rounding of
approximate logarithms, powers and roots; a stored code may differ by one on the edge.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from coat_jax.kernels.expansion import clip, mix, noise_bits, reciprocal, sqrt
from coat_jax.kernels.launch import kernel
from coat_jax.kernels.moments import encode_first, encode_second, load_codes, read_moments
from coat_jax.numerics import noise
from coat_jax.numerics.expansion import SMALLEST, Expanded
from coat_jax.storage import Storage, stochastic_below

if TYPE_CHECKING:
    import triton.language as tl


Number = float | Array
LARGEST_GRADIENT = 2.0**63


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
    leaf_id: int,
    decayed: bool = True,
) -> Stepped:
    """Steps one leaf, which is `leaf_id` in `noise.leaf_ids` of its tree."""
    storage = settings.storage
    m, v = storage.read_moments(leaf.mu, leaf.nu)
    m, v, direction = adam_update(
        m,
        v,
        leaf.grad,
        count,
        hyper,
        nesterov=settings.nesterov,
        smallest_v=storage.smallest_second(leaf.nu),
    )

    key = noise.leaf_key(storage.seed, count, leaf_id)
    key = noise.distinguish(key, *jax.tree.leaves(leaf))
    if leaf.param is None:
        result = direction.astype(leaf.grad.dtype)
    else:
        # In FP32, or in the parameter's FP64: that of a step of zero must not change.
        param = leaf.param.astype(jnp.promote_types(leaf.param.dtype, jnp.float32))
        if decayed:
            direction = direction + hyper.weight_decay * param
        result = param + -hyper.learning_rate * direction
        if settings.round_params and leaf.param.dtype == jnp.bfloat16:
            result = noise.round_to_bfloat16(result, noise.param_key(key), run=storage.group_size)
        result = result.astype(leaf.param.dtype)

    stepped = Stepped(result, *storage.write_moments(m, v, key, hyper.b1, hyper.b2))
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
    smallest_v: Float[Array, ...] | float = 0.0,
) -> tuple[Float[Array, ...], Float[Array, ...], Float[Array, ...]]:
    """Returns the new moments and the direction, in FP32.

    `smallest_v` is the smallest second moment that could be stored: a smaller one counts as
    that in the direction.
    """
    b1, b2 = hyper.b1, hyper.b2
    infinite = jnp.isinf(grad)
    grad = grad.astype(jnp.promote_types(grad.dtype, jnp.float32)) * hyper.grad_scale
    grad = jnp.clip(grad, -LARGEST_GRADIENT, LARGEST_GRADIENT).astype(jnp.float32)
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * jnp.square(grad)
    debias1, debias2 = bias(b1, count), bias(b2, count)
    m_hat = m / debias1
    if nesterov:
        m_hat = b1 * m / bias(b1, count + 1) + (1 - b1) * grad / debias1
    m_hat = jnp.where(infinite, jnp.nan, m_hat)
    v_hat = jnp.maximum(v, b2 * smallest_v) / debias2
    direction = m_hat / (jnp.sqrt(v_hat + hyper.eps_root) + jnp.maximum(hyper.eps, SMALLEST))
    bound = largest_direction(count, b1, b2, nesterov=nesterov)
    return m, v, jnp.clip(direction, -bound, bound)


def largest_direction(
    count: Int[Array, ""], b1: Number, b2: Number, *, nesterov: bool
) -> Float[Array, ""]:
    """The largest |direction| that exact moments can give at step t = count, for any gradients.

    m_hat is a sum of  c_i g_(t-i),  and v a sum of  (1 - b2) b2^i g_(t-i)^2,  over i = 0 .. t - 1.
    By the Cauchy-Schwarz inequality

        m_hat^2 / v_hat <= (1 - b2^t) / (1 - b2)  sum of c_i^2 / b2^i

    where c_i = c b1^i but for Nesterov's c_0. With r = b1^2 / b2 the sum is  c_0^2 + c^2 (s - 1),
    s = (r^t - 1) / (r - 1). It tends to (1 - b1)^2 / (1 - r), and has no limit if r >= 1. At the
    first step it is 1: the direction is the gradient's sign.
    """
    t = count.astype(jnp.float32)
    debias1, debias2 = bias(b1, count), bias(b2, count)
    log_r = 2 * log_decay(b1) - log_decay(b2)
    # No power of b1 = 0 is left after the first, also if b2 = 0. With b2 = 0 alone r is infinite.
    log_r = jnp.where(jnp.asarray(b1) == 0, -jnp.inf, jnp.asarray(log_r, jnp.float32))
    many = jnp.where(log_r == 0, t, jnp.expm1(t * log_r) / jnp.expm1(log_r))
    powers = jnp.where(t == 1, 1.0, jnp.where(log_r == jnp.inf, jnp.inf, many))
    first = rest = (1 - b1) / debias1
    if nesterov:
        rest = b1 * (1 - b1) / bias(b1, count + 1)
        first = first + rest
    others = jnp.where(powers > 1, jnp.square(rest) * (powers - 1), 0.0)
    return jnp.sqrt(debias2 / (1 - b2) * (jnp.square(first) + others))


def bias(decay: Number, count: Int[Array, ""]) -> Float[Array, ""]:
    """1 - decay^count, without cancellation for decay near 1."""
    return -jnp.expm1(count.astype(jnp.float32) * log_decay(decay))


def log_decay(decay: Number) -> Number:
    if isinstance(decay, int | float):
        return math.log(decay) if decay > 0 else -math.inf
    return jnp.log(decay)


# --- The kernel ------------------------------------------------------------------------------


def numbers_of_step(
    count: Int[Array, ""], hyper: Hyper, *, nesterov: bool, has_param: bool, smallest_v: float
) -> Float[Array, 15]:
    """What the kernel multiplies by, the same for all elements: computed once, by XLA.

    `smallest_v` is `Storage.resolution_of_second`.
    """
    lr, b1, b2, eps, eps_root, weight_decay, grad_scale, skip = hyper
    debias1, debias2 = bias(b1, count), bias(b2, count)
    from_m, from_grad = 1 / debias1, jnp.zeros([])
    if nesterov:
        from_m, from_grad = b1 / bias(b1, count + 1), (1 - b1) * grad_scale / debias1
    sign = -lr if has_param else 1.0
    bound = jnp.abs(sign) * largest_direction(count, b1, b2, nesterov=nesterov)
    numbers = [
        jnp.log2(b1),  # 0, 1: of the first moment and the gradient
        (1 - b1) * grad_scale,
        jnp.log2(b2),  # 2, 3: of the second moment; of the gradient before it is squared
        jnp.sqrt(1.0 - b2) * grad_scale,
        jax.lax.rsqrt(debias2),  # 4 - 6: sqrt(v + [6]) * [4] + [5] divides
        jnp.maximum(eps, SMALLEST),
        eps_root * debias2,
        sign * from_m,  # 7, 8: what is divided
        sign * from_grad,
        lr * weight_decay,  # 9
        skip,  # 10: whether nothing is stored
        LARGEST_GRADIENT / jnp.abs(grad_scale),  # 11: of the gradient as it arrives
        jnp.where(jnp.isnan(bound), jnp.inf, bound),  # 12; 0 inf at a learning rate of zero
        b2 * smallest_v,  # 13: times a group's largest v, the least that divides
        stochastic_below(b1, b2),  # 14: of codes of directions
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
    raw = tl.load(grad + start + at, mask=here, other=0.0).to(tl.float32)
    mu = load_codes(mu_codes + start + at, here, MU)
    nu = load_codes(nu_codes + start + at, here, NU)
    if HAS_PARAM:
        p = tl.load(param + start + at, mask=here, other=0.0).to(tl.float32)
    mu_amax = tl.load(mu_amax + group, mask=exists, other=0.0)
    nu_amax = tl.load(nu_amax + group, mask=exists, other=0.0)
    mu_k16 = tl.load(mu_k16 + group, mask=exists, other=16)
    nu_k16 = tl.load(nu_k16 + group, mask=exists, other=16)
    g = clip(raw, tl.load(numbers + 11), FAST)
    m, v = read_moments(
        mu, mu_amax, mu_k16, nu, nu_amax, nu_k16,
        tl.load(numbers), tl.load(numbers + 2), MU, NU, FAST,
    )  # fmt: skip
    m += tl.load(numbers + 1) * g
    root_of_new = tl.load(numbers + 3) * g
    v += root_of_new * root_of_new

    if MAY_SKIP:  # What is not stored stays: the step is in place.
        skipped = tl.load(numbers + 10) != 0.0
        exists = tl.where(skipped, False, exists)
        here = tl.where(skipped, False, here)

    # The direction, or the new parameter.
    smallest = nu_amax * tl.load(numbers + 13)
    spread = tl.maximum(v, smallest[:, None], propagate_nan=tl.PropagateNan.ALL)
    if EPS_ROOT:
        spread += tl.load(numbers + 6)
    spread = sqrt(spread, FAST) * tl.load(numbers + 4) + tl.load(numbers + 5)
    moved = m * tl.load(numbers + 7)
    if NESTEROV:
        moved += g * tl.load(numbers + 8)
    moved = clip(moved * reciprocal(spread, FAST), tl.load(numbers + 12), FAST)
    moved += raw * 0.0  # NaN for an infinite gradient, as exact moments would give
    key = tl.load(keys + tl.load(layout + 4))
    run = group + tl.load(layout + 6)
    for jump in tl.static_range(JUMPS):
        run += (group // tl.load(layout + 7 + 2 * jump)) * tl.load(layout + 8 + 2 * jump)
    run = run.to(tl.uint32)
    if HAS_PARAM:
        shrink = 1.0 - tl.load(numbers + 9) * tl.load(layout + 5).to(tl.float32)
        moved += p * shrink
        if ROUND_PARAM:
            own, _ = noise_bits(mix(key ^ 0x5BD1E995), run, 0, 0, GROUP, FAST)
            bits = moved.to(tl.uint32, bitcast=True) + own
            rounded = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
            moved = tl.where(moved == moved, rounded, moved)  # noqa: PLR0124, NaN stays NaN
    tl.store(result + start + at, moved.to(result.dtype.element_ty), mask=here)

    # Encode. Both moments of an element take their noise from one hash, but other bits of it.
    if MU[8] + NU[8] > 0:
        for_v, for_m = noise_bits(key, run, NU[9], MU[9], GROUP, FAST)
    else:
        for_v, for_m = v, m  # not used
    codes, amax, k16 = encode_second(v, for_v, NU, FAST)
    tl.store(nu_codes_out + start + at, codes.to(nu_codes_out.dtype.element_ty), mask=here)
    tl.store(nu_amax_out + group, amax, mask=exists)
    tl.store(nu_k16_out + group, k16.to(tl.uint8), mask=exists)
    codes, amax, k16 = encode_first(m, for_m, v, amax, tl.load(numbers + 14), MU, NU, FAST)
    tl.store(mu_codes_out + start + at, codes.to(mu_codes_out.dtype.element_ty), mask=here)
    tl.store(mu_amax_out + group, amax, mask=exists)
    tl.store(mu_k16_out + group, k16.to(tl.uint8), mask=exists)
