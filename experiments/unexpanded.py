"""Adam with FP8 moments but without dynamic range expansion: the ablation.

Codes and one FP32 scale per group, rounded to nearest, as `numerics.qtensor` does. It shows what
expansion and stochastic rounding are worth; for training use `scale_by_fp8_adam`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from coat_jax.kernels.adam import Hyper, Number, adam_update
from coat_jax.numerics.qtensor import QTensor, dequantize, quantize, scales_shape
from coat_jax.optax.arguments import require_hyper, require_settings
from coat_jax.optax.checks import require_real_floats, require_same_shapes
from coat_jax.optax.sharding import zeros
from coat_jax.storage import Storage


class ScaleByUnexpandedAdamState(NamedTuple):
    """FP8 codes and FP32 scales of both moments, each a tree like the parameters."""

    count: Int32[Array, ""]  # type: ignore[assignment]
    mu_codes: Any
    mu_scale: Any
    nu_codes: Any
    nu_scale: Any


def scale_by_unexpanded_fp8_adam(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    nesterov: bool = False,
    storage: Storage | None = None,
) -> optax.GradientTransformation:
    """As `scale_by_fp8_adam`, with plain group-scaled FP8 moments; every leaf is in FP8."""
    hyper = Hyper(b1=b1, b2=b2, eps=eps, eps_root=eps_root)
    require_hyper(hyper)
    require_settings(storage=storage, nesterov=nesterov)
    storage = storage or Storage()
    group_size = storage.group_size

    def init(params: optax.Params) -> ScaleByUnexpandedAdamState:
        require_real_floats(params)

        def codes(dtype: Any) -> Any:
            return jax.tree.map(lambda p: zeros(p, p.shape, dtype), params)

        def scale() -> Any:
            return jax.tree.map(
                lambda p: zeros(p, scales_shape(p.shape, group_size), jnp.float32), params
            )

        return ScaleByUnexpandedAdamState(
            jnp.zeros([], jnp.int32), codes(storage.other), scale(), codes(storage.other), scale()
        )

    def update(
        updates: optax.Updates,
        state: ScaleByUnexpandedAdamState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, ScaleByUnexpandedAdamState]:
        del params
        require_same_shapes("gradients", updates, state.mu_codes)
        count = optax.safe_increment(state.count)

        def step(g: Any, mc: Any, ms: Any, nc: Any, ns: Any) -> tuple[Any, ...]:
            m = dequantize(QTensor(mc, ms, group_size))
            v = dequantize(QTensor(nc, ns, group_size))
            m, v, direction = adam_update(m, v, g, count, hyper, nesterov=nesterov)
            mu = quantize(m, storage.other, group_size=group_size)
            nu = quantize(v, storage.other, group_size=group_size)
            return direction.astype(g.dtype), mu.codes, mu.scale, nu.codes, nu.scale

        stepped = jax.tree.map(step, updates, *state[1:])
        new = jax.tree.transpose(jax.tree.structure(updates), jax.tree.structure((0,) * 5), stepped)
        return new[0], ScaleByUnexpandedAdamState(count, *new[1:])

    return optax.GradientTransformation(init, update)
