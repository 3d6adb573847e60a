"""One step of AdamW whose moments are stored in 8 bits: decode, update, encode.

    g = clip(grad_scale g, 2^63)                 whose square is finite in FP32
    m = b1 m + (1 - b1) g                        v = b2 v + (1 - b2) g^2
    d = m / (1 - b1^t) / (sqrt(max(v, b2 s) / (1 - b2^t) + eps_root) + eps)
    d = clip(d, largest_direction)               what exact moments could give at most
    p = p - learning_rate (d + weight_decay p)

s is the smallest second moment that the element's group can store, about amax 2^-36. A smaller v
may have been rounded to zero, so its root cannot be trusted. Dividing by the larger number makes
the step too small, not too large.

BF16 parameters may have corrections (`numerics.corrections`): p is then a number of 24 bits.

`adam_reference` computes this in `jnp`, one leaf at a time: it is the specification, and steps the
leaves that the kernel does not. The Triton kernel (`triton.adam`, launched by `adam_launch`) takes
one pass over memory, in place: it moves 14.2 bytes per FP32 parameter with BF16 gradients. Without
a parameter both return the direction d, for the next transformations of an optax chain. Results of
kernel and reference differ by the rounding of approximate logarithms, powers and roots. A stored
code may differ by one where the exact value is near the middle between two codes.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8, UInt32

from coat_jax.numerics import corrections, noise
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import SMALLEST_NORMAL
from coat_jax.storage import Storage, stochastic_below

Number = float | Array
LARGEST_GRADIENT = 2.0**63


class Hyper(NamedTuple):
    """The hyperparameters of a step: Python floats, or scalars computed in the program."""

    learning_rate: Number = 0.0
    b1: Number = 0.9
    b2: Number = 0.999
    eps: Number = 1e-8
    eps_root: Number = 0.0
    weight_decay: Number = 0.0
    grad_scale: Number = 1.0  # multiplies the gradients: clipping, loss scaling
    skip: bool | Array = False  # if true, the step changes nothing


class Leaf(NamedTuple):
    """The arrays of one leaf; `param` is None if only the direction is wanted."""

    param: Float[Array, "..."] | None
    grad: Float[Array, "..."]
    mu: Expanded
    nu: Expanded
    correction: Int8[Array, "..."] | None = None  # of a BF16 parameter


class LeafResult(NamedTuple):
    """The results for one leaf: the new parameter, or the direction; and the new moments."""

    result: Float[Array, "..."]
    mu: Expanded
    nu: Expanded
    correction: Int8[Array, "..."] | None = None  # of the new parameter, if it had one


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when a step is compiled."""

    storage: Storage = Storage()
    nesterov: bool = False
    round_params: bool = False  # BF16 parameters rounded stochastically; corrections always are


def adam_reference(
    leaf: Leaf,
    count: Int[Array, ""],
    hyper: Hyper,
    settings: Settings,
    key: UInt32[Array, ""],
    decayed: bool = True,
    dtype: DTypeLike | None = None,
) -> LeafResult:
    """Steps one leaf; `key`, the leaf's at this step, seeds its rounding.

    A direction has the `dtype`, or by default its gradient's.
    """
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

    correction = None
    if leaf.param is None:
        result = direction.astype(leaf.grad.dtype if dtype is None else dtype)
    else:
        # In FP32; FP64 stays FP64, because a step of zero must not change it.
        param = leaf.param.astype(np.promote_types(leaf.param.dtype, np.float32))
        if leaf.correction is not None:
            param = corrections.join(leaf.param, leaf.correction)
        if decayed:
            direction = direction + hyper.weight_decay * param
        # A schedule may be in FP64.
        result = (param + -hyper.learning_rate * direction).astype(param.dtype)
        if leaf.correction is not None:
            own = noise.bits(noise.param_key(key), param.shape, run=storage.group_size)
            result, correction = corrections.split(result, own >> 8)
        elif settings.round_params and leaf.param.dtype == jnp.bfloat16:
            result = noise.round_to_bfloat16(result, noise.param_key(key), run=storage.group_size)
        result = result.astype(leaf.param.dtype)

    moments = storage.write_moments(m, v, key, hyper.b1, hyper.b2)
    stepped = LeafResult(result, *moments, correction)
    if hyper.skip is False:
        return stepped
    old = result if leaf.param is None else leaf.param
    before = LeafResult(old, leaf.mu, leaf.nu, leaf.correction)
    return jax.tree.map(lambda old, new: jnp.where(hyper.skip, old, new), before, stepped)


def adam_update(
    m: Float[Array, "..."],
    v: Float[Array, "..."],
    grad: Float[Array, "..."],
    count: Int[Array, ""],
    hyper: Hyper,
    *,
    nesterov: bool,
    smallest_v: Float[Array, "..."] | float = 0.0,
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Returns the new moments and the direction, in FP32.

    `smallest_v` is the smallest second moment that can be stored. The direction is divided by the
    root of at least that.
    """
    b1, b2 = hyper.b1, hyper.b2
    infinite = jnp.isinf(grad)
    grad = grad.astype(np.promote_types(grad.dtype, np.float32))
    # An infinite gradient enters the moments as a finite one; infinity times 0 would be NaN.
    limit = jnp.minimum(jnp.finfo(grad.dtype).max * jnp.abs(hyper.grad_scale), LARGEST_GRADIENT)
    grad = grad * jnp.where(hyper.grad_scale == 0, 1, hyper.grad_scale)
    grad = jnp.clip(grad, -limit, limit).astype(jnp.float32)
    m = b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * jnp.square(grad)
    debias1, debias2 = bias(b1, count), bias(b2, count)
    m_hat = m / debias1
    if nesterov:
        m_hat = b1 * m / bias(b1, count + 1) + (1 - b1) * grad / debias1
    m_hat = jnp.where(infinite, jnp.nan, m_hat)
    v_hat = jnp.maximum(v, b2 * smallest_v) / debias2
    direction = m_hat / (jnp.sqrt(v_hat + hyper.eps_root) + jnp.maximum(hyper.eps, SMALLEST_NORMAL))
    bound = largest_direction(count, b1, b2, nesterov=nesterov)
    return m, v, jnp.clip(direction, -bound, bound)


def largest_direction(
    count: Int[Array, ""], b1: Number, b2: Number, *, nesterov: bool
) -> Float[Array, ""]:
    """The largest |direction| that exact moments can give at step t = count, for any gradients.

    m_hat is a sum of  c_i g_(t-i),  and v a sum of  (1 - b2) b2^i g_(t-i)^2,  over i = 0 .. t - 1.
    By the Cauchy-Schwarz inequality

        m_hat^2 / v_hat <= (1 - b2^t) / (1 - b2)  sum of c_i^2 / b2^i

    where c_i = c b1^i, except for Nesterov's c_0. With r = b1^2 / b2 the sum is
    c_0^2 + c^2 (s - 1),  s = (r^t - 1) / (r - 1). It tends to (1 - b1)^2 / (1 - r), and has no
    limit if r >= 1. At the first step it is 1: the direction is the gradient's sign.
    """
    t = count.astype(jnp.float32)
    debias1, debias2 = bias(b1, count), bias(b2, count)
    log_r = 2 * log_decay(b1) - log_decay(b2)
    # If b1 = 0, only the first power is left, even if b2 = 0. If only b2 = 0, r is infinite.
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
    """log(decay), which is minus infinity for a decay of zero."""
    if isinstance(decay, int | float):
        return math.log(decay) if decay > 0 else -math.inf
    return jnp.log(decay)


class StepNumbers(NamedTuple):
    """The scalars of a step, as the kernel uses them. NUMBER has the index of each."""

    log2_b1: Number  # m <- b1 m + grad_to_m g
    grad_to_m: Number
    log2_b2: Number  # v <- b2 v + (grad_to_root_v g)^2
    grad_to_root_v: Number
    rsqrt_debias2: Number  # denominator = sqrt(v + eps_root) rsqrt_debias2 + eps
    eps: Number
    eps_root: Number
    m_to_step: Number  # numerator = m_to_step m + grad_to_step g; for a parameter's step both
    grad_to_step: Number  # have the factor -learning_rate
    decay: Number  # learning_rate * weight_decay: what is subtracted, relative to the parameter
    skip: Number  # 1 if nothing is stored
    largest_gradient: Number  # before grad_scale
    largest_step: Number
    smallest_v: Number  # of a group, for a largest v of 1
    stochastic_below: Number  # smaller codes of a direction are rounded stochastically


NUMBER = StepNumbers(*range(len(StepNumbers._fields)))


def numbers_of_step(
    count: Int[Array, ""], hyper: Hyper, *, nesterov: bool, has_param: bool, smallest_v: float
) -> Float[Array, " numbers"]:
    """The `StepNumbers` as one array, which XLA computes once per step.

    `smallest_v` is `Storage.resolution_of_second`.
    """
    lr, b1, b2, eps, eps_root, weight_decay, grad_scale, skip = hyper
    debias1, debias2 = bias(b1, count), bias(b2, count)
    from_m, from_grad = 1 / debias1, jnp.zeros([])
    if nesterov:
        from_m, from_grad = b1 / bias(b1, count + 1), (1 - b1) * grad_scale / debias1
    factor = -lr if has_param else 1.0  # the step is this times the direction
    bound = jnp.abs(factor) * largest_direction(count, b1, b2, nesterov=nesterov)
    numbers = StepNumbers(
        log2_b1=jnp.log2(b1),
        grad_to_m=(1 - b1) * grad_scale,
        log2_b2=jnp.log2(b2),
        grad_to_root_v=jnp.sqrt(1.0 - b2) * grad_scale,
        rsqrt_debias2=jax.lax.rsqrt(debias2),
        eps=jnp.maximum(eps, SMALLEST_NORMAL),
        eps_root=eps_root * debias2,
        m_to_step=factor * from_m,
        grad_to_step=factor * from_grad,
        decay=lr * weight_decay,
        skip=skip,
        # Finite, so that an infinite gradient enters the moments as a finite one.
        largest_gradient=jnp.minimum(
            LARGEST_GRADIENT / jnp.abs(grad_scale), jnp.finfo(jnp.float32).max
        ),
        largest_step=jnp.where(jnp.isnan(bound), jnp.inf, bound),  # 0 * inf at a learning rate of 0
        smallest_v=b2 * smallest_v,
        stochastic_below=stochastic_below(b1, b2),
    )
    return jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])
