"""AdamW whose moments live in FP8 with dynamic range expansion.

    m = b1 m + (1 - b1) g            stored as E4M3 codes, the smallest rounded stochastically
    v = b2 v + (1 - b2) g^2          stored as E4M3 codes, rounded stochastically
    u = m_hat / (sqrt(v_hat + eps_root) + eps)

`scale_by_fp8_adam` is this; `fp8_adamw` chains it with weight decay and the learning rate,
with the argument names and defaults of `optax.adamw`. The state is 2.08 bytes per parameter
instead of 8. Arithmetic is in FP32 whatever the dtypes; updates have the gradients' dtype, as
in optax.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from coat_jax import expansion, noise
from coat_jax.expansion import Expanded
from coat_jax.kernels.adam import Hyper, Leaf, Number, Settings
from coat_jax.kernels.adam_launch import adam_step
from coat_jax.kernels.dispatch import Implementation
from coat_jax.moments import Storage
from coat_jax.optax.checks import require_real_floats, require_same_shapes, require_sensible
from coat_jax.optax.sharding import zeros


class ScaleByFP8AdamState(NamedTuple):
    """The state of `scale_by_fp8_adam`: trees of arrays, each leaf following its parameter.

    mu and nu each hold three trees: codes (FP8, the parameter's shape), amax (FP32) and k16
    (uint8), one number per group along the last axis. See `coat_jax.moments` for FP32 leaves.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    mu: Expanded
    nu: Expanded


def scale_by_fp8_adam(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    nesterov: bool = False,
    storage: Storage | None = None,
    implementation: Implementation | None = None,
) -> optax.GradientTransformation:
    """Rescales updates as Adam does, with both moments stored in FP8.

    Args:
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.
        eps_root: added inside the root.
        nesterov: whether to use Nesterov momentum, as optax has it.
        storage: formats, group size, rounding and which leaves stay in FP32.
        implementation: None, "xla" or "triton"; see `coat_jax.kernels.dispatch`.
    """
    hyper = Hyper(b1=b1, b2=b2, eps=eps, eps_root=eps_root)
    settings = Settings(storage or Storage(), nesterov)
    require_sensible(hyper)

    def init(params: optax.Params) -> ScaleByFP8AdamState:
        return init_state(params, settings.storage)

    def update(
        updates: optax.Updates, state: ScaleByFP8AdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByFP8AdamState]:
        del params
        return step_tree(None, updates, state, hyper, settings, implementation=implementation)

    return optax.GradientTransformation(init, update)


def fp8_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    weight_decay: Number = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    nesterov: bool = False,
    storage: Storage | None = None,
    implementation: Implementation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with both moments stored in FP8; a drop-in for `optax.adamw`.

    Args:
        learning_rate: a number or a schedule.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.
        eps_root: added inside the root.
        weight_decay: decoupled from the gradient, multiplied by the learning rate.
        mask: a tree of booleans, or a function from parameters to one: which leaves decay.
        nesterov: whether to use Nesterov momentum, as optax has it.
        storage: formats, group size, rounding and which leaves stay in FP32.
        implementation: None, "xla" or "triton"; see `coat_jax.kernels.dispatch`.

    Example:
        >>> import coat_jax as coat, jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones((256, 256))}
        >>> tx = coat.optax.fp8_adamw(1e-3, b2=0.95, weight_decay=0.1)
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": jnp.ones((256, 256))}, state, params)
        >>> state[0].mu.codes["w"].dtype.name
        'float8_e4m3fn'
    """
    require_sensible(Hyper(learning_rate=learning_rate, weight_decay=weight_decay))
    return optax.chain(
        scale_by_fp8_adam(
            b1,
            b2,
            eps,
            eps_root,
            nesterov=nesterov,
            storage=storage,
            implementation=implementation,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def init_state(params: optax.Params, storage: Storage) -> ScaleByFP8AdamState:
    """The state before the first step: zeros, sharded as the parameters are."""
    require_real_floats(params)

    def moment(dtype: Any) -> Expanded:
        def codes(p: Any) -> Array:
            return zeros(p, p.shape, dtype if storage.holds_in_fp8(p.shape) else jnp.float32)

        def per_group(p: Any, dtype: Any, value: int) -> Array:
            return zeros(p, storage.scales_shape(p.shape), dtype) + jnp.asarray(value, dtype)

        return Expanded(
            jax.tree.map(codes, params),
            jax.tree.map(lambda p: per_group(p, jnp.float32, 0), params),
            jax.tree.map(lambda p: per_group(p, jnp.uint8, expansion.STEPS), params),
        )

    return ScaleByFP8AdamState(
        jnp.zeros([], jnp.int32), moment(storage.first), moment(storage.second)
    )


def step_tree(
    params: optax.Params | None,
    grads: optax.Updates,
    state: ScaleByFP8AdamState,
    hyper: Hyper,
    settings: Settings,
    *,
    decayed: list[bool] | None = None,
    implementation: Implementation | None,
) -> tuple[Any, ScaleByFP8AdamState]:
    """Steps a whole tree: returns new parameters (directions without them) and state."""
    require_real_floats(grads)
    require_same_shapes("gradients", grads, state.mu.codes)
    leaves, structure = jax.tree.flatten(grads)
    if params is None:
        old: list[Any] = [None] * len(leaves)
    else:
        require_same_shapes("parameters", params, state.mu.codes)
        old = jax.tree.leaves(params)
    per_leaf = [
        Leaf(p, g, mu, nu)
        for p, g, mu, nu in zip(old, leaves, _unzip(state.mu), _unzip(state.nu), strict=True)
    ]
    count = optax.safe_increment(state.count)
    stepped = adam_step(
        per_leaf,
        count,
        hyper,
        settings,
        ids=noise.leaf_ids(grads),
        decayed=decayed,
        implementation=implementation,
    )
    result = jax.tree.unflatten(structure, [s.result for s in stepped])
    mu = _zip([s.mu for s in stepped], structure)
    nu = _zip([s.nu for s in stepped], structure)
    if hyper.skip is not False:
        count = jnp.where(hyper.skip, state.count, count)
    return result, ScaleByFP8AdamState(count, mu, nu)


def _unzip(moment: Expanded) -> list[Expanded]:
    """An `Expanded` of trees as a list with one `Expanded` per leaf."""
    return [Expanded(*arrays) for arrays in zip(*map(jax.tree.leaves, moment), strict=True)]


def _zip(leaves: list[Expanded], structure: Any) -> Expanded:
    """The inverse of `_unzip`."""
    return Expanded(
        *(jax.tree.unflatten(structure, [getattr(e, f) for e in leaves]) for f in Expanded._fields)
    )
