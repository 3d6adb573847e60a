"""Every optimizer and wrapper of optax through `coat.optax.compress`: what works, and how well.

    python -m experiments.compress_table

Each is trained twice on a small regression, as it is and compressed, with FP32 and with BF16
parameters; the figure is the loss after 200 steps, the mean of three seeds. A network of 64 x 128
weights has one leaf that is large enough for FP8. Transformations that store no moment are run
for one step, whose updates must be the same bit for bit. Results: results/compress_table.json.
"""

import concurrent.futures
import logging
import multiprocessing
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import coat_jax as coat
from experiments import records

RESULTS = Path(__file__).parent / "results" / "compress_table.json"
STORAGE = coat.Storage(min_size=1024)
STEPS, BATCH, SEEDS = 200, 64, 3
INPUTS, HIDDEN, OUTPUTS = 64, 128, 8
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def large(params: Any) -> Any:
    """Which parameters are matrices: for wrappers that choose some."""
    return jax.tree.map(lambda p: jnp.ndim(p) > 1, params)


def labels(params: Any) -> Any:
    """The same as labels, for optax.partition."""
    return jax.tree.map(lambda p: "matrix" if jnp.ndim(p) > 1 else "vector", params)


def muon_dimensions(params: Any) -> Any:
    """All parameters, of which optax.masked leaves the matrices, as matrices."""
    return jax.tree.map(lambda p: contrib.MuonDimensionNumbers(), params)


def scaled(rate: float, *links: optax.GradientTransformation) -> optax.GradientTransformation:
    """A chain that ends with a learning rate."""
    return optax.chain(*links, optax.scale_by_learning_rate(rate))


adam = optax.adam(3e-3)
key = jax.random.key(0)

# What stores moments, or copies of parameters: trained.
TRAINED: dict[str, Callable[[], Any]] = {
    "adabelief": lambda: optax.adabelief(3e-3),
    "adadelta": lambda: optax.adadelta(1.0),
    "adafactor": lambda: optax.adafactor(1e-2, momentum=0.9, min_dim_size_to_factor=32),
    "adagrad": lambda: optax.adagrad(3e-2),
    "adam": lambda: adam,
    "adamax": lambda: optax.adamax(3e-3),
    "adamaxw": lambda: optax.adamaxw(3e-3),
    "adamw": lambda: optax.adamw(3e-3),
    "adan": lambda: optax.adan(3e-3),
    "amsgrad": lambda: optax.amsgrad(3e-3),
    "apply_every": lambda: optax.chain(optax.sgd(0.1), optax.apply_every(4)),
    "apply_if_finite": lambda: optax.apply_if_finite(adam, 3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), adam),
    "conditionally_mask": lambda: optax.conditionally_mask(adam, lambda step: step >= 0),
    "conditionally_transform": lambda: optax.conditionally_transform(adam, lambda step: step >= 0),
    "ema": lambda: scaled(0.1, optax.ema(0.9)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(3e-3),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(3e-3),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1.0),
    "lion": lambda: optax.lion(1e-3),
    "lookahead": lambda: optax.lookahead(adam, 5, 0.5),
    "masked": lambda: optax.masked(adam, large),
    "multi_transform": lambda: optax.multi_transform({"matrix": adam, "vector": adam}, labels),
    "MultiSteps": lambda: optax.MultiSteps(adam, 2),
    "nadam": lambda: optax.nadam(3e-3),
    "nadamw": lambda: optax.nadamw(3e-3),
    "named_chain": lambda: optax.named_chain(("adam", adam)),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "novograd": lambda: optax.novograd(3e-2),
    "optimistic_adam": lambda: optax.optimistic_adam(3e-3),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(3e-3),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.1),
    "partition": lambda: optax.partition({"matrix": adam, "vector": optax.sgd(0.1)}, labels),
    "radam": lambda: optax.radam(3e-3),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9),
    "rprop": lambda: optax.rprop(1e-3),
    "scale_by_stddev": lambda: scaled(1e-3, optax.scale_by_stddev()),
    "selective_transform": lambda: optax.selective_transform(
        adam, freeze_mask={"up": False, "up_bias": True, "down": False, "down_bias": True}
    ),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "signum": lambda: optax.signum(1e-3),
    "sm3": lambda: optax.sm3(0.1),
    "snapshot": lambda: optax.chain(adam, optax.snapshot("last", lambda updates: updates)),
    "trace": lambda: scaled(0.1, optax.trace(0.9)),
    "with_extra_args_support": lambda: optax.with_extra_args_support(adam),
    "yogi": lambda: optax.yogi(3e-3),
    "contrib.acprop": lambda: contrib.acprop(1e-3),
    "contrib.ademamix": lambda: contrib.ademamix(3e-3),
    "contrib.adopt": lambda: contrib.adopt(3e-3),
    "contrib.cocob": contrib.cocob,
    "contrib.dadapt_adamw": lambda: contrib.dadapt_adamw(1.0),
    "contrib.dog": lambda: contrib.dog(1.0),
    "contrib.dowg": lambda: contrib.dowg(1.0),
    "contrib.dpsgd": lambda: contrib.dpsgd(0.1, 1.0, 0.01, 0, momentum=0.9),
    "contrib.galore": lambda: contrib.galore(3e-3, rank=32),
    "contrib.madgrad": lambda: contrib.madgrad(1e-2),
    "contrib.mechanize": lambda: contrib.mechanize(optax.adamw(3e-3)),
    "contrib.momo": lambda: contrib.momo(1.0),
    "contrib.momo_adam": lambda: contrib.momo_adam(1e-2),
    "contrib.muon": lambda: contrib.muon(1e-2),
    "contrib.prodigy": lambda: contrib.prodigy(1.0),
    "contrib.sam": lambda: contrib.sam(adam, optax.sgd(0.01)),
    "contrib.schedule_free": lambda: contrib.schedule_free(optax.sgd(0.5), 0.5),
    "contrib.schedule_free_adamw": lambda: contrib.schedule_free_adamw(1e-2),
    "contrib.schedule_free_sgd": lambda: contrib.schedule_free_sgd(0.5),
    "contrib.simplified_ademamix": lambda: contrib.simplified_ademamix(1e-4),
    "contrib.sophia": lambda: contrib.sophia(1e-3),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(adam),
    # Not of optax: what else people wrap.
    "optax.flatten(compress(adam))": lambda: adam,
}

# The links that the optimizers above are made of: traced, but not trained again.
LINKS: dict[str, Callable[[], Any]] = {
    "scale_by_adadelta": lambda: scaled(1.0, optax.scale_by_adadelta()),
    "scale_by_adam": lambda: scaled(3e-3, optax.scale_by_adam()),
    "scale_by_adamax": lambda: scaled(3e-3, optax.scale_by_adamax()),
    "scale_by_adan": lambda: scaled(3e-3, optax.scale_by_adan()),
    "scale_by_amsgrad": lambda: scaled(3e-3, optax.scale_by_amsgrad()),
    "scale_by_belief": lambda: scaled(3e-3, optax.scale_by_belief()),
    "scale_by_distance_over_gradients": lambda: scaled(
        1.0, optax.scale_by_distance_over_gradients()
    ),
    "scale_by_lion": lambda: scaled(1e-3, optax.scale_by_lion()),
    "scale_by_novograd": lambda: scaled(3e-2, optax.scale_by_novograd()),
    "scale_by_optimistic_gradient": lambda: scaled(0.1, optax.scale_by_optimistic_gradient()),
    "scale_by_radam": lambda: scaled(3e-3, optax.scale_by_radam()),
    "scale_by_rms": lambda: scaled(1e-3, optax.scale_by_rms()),
    "scale_by_rprop": lambda: optax.chain(optax.scale_by_rprop(1e-3), optax.scale(-1.0)),
    "scale_by_rss": lambda: scaled(3e-2, optax.scale_by_rss()),
    "scale_by_sm3": lambda: scaled(0.1, optax.scale_by_sm3()),
    "scale_by_yogi": lambda: scaled(3e-3, optax.scale_by_yogi()),
    "contrib.scale_by_acprop": lambda: scaled(1e-3, contrib.scale_by_acprop()),
    "contrib.scale_by_ademamix": lambda: scaled(3e-3, contrib.scale_by_ademamix()),
    "contrib.scale_by_adopt": lambda: scaled(3e-3, contrib.scale_by_adopt()),
    "contrib.scale_by_cocob": contrib.scale_by_cocob,
    "contrib.scale_by_galore": lambda: scaled(3e-3, contrib.scale_by_galore(rank=32)),
    "contrib.scale_by_madgrad": lambda: contrib.scale_by_madgrad(1e-2),
    "contrib.scale_by_muon": lambda: optax.partition(
        {
            "matrix": scaled(1e-2, contrib.scale_by_muon(weight_dimension_numbers=muon_dimensions)),
            "vector": adam,
        },
        labels,
    ),
    "contrib.scale_by_simplified_ademamix": lambda: scaled(
        1e-4, contrib.scale_by_simplified_ademamix()
    ),
}

# What stores nothing that follows a parameter: one step.
STATELESS: dict[str, Callable[[], Any]] = {
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.1, 0),
    "centralize": optax.centralize,
    "clip": lambda: optax.clip(1.0),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(1.0),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "freeze": lambda: optax.freeze(
        {"up": False, "up_bias": True, "down": False, "down_bias": True}
    ),
    "fromage": lambda: optax.fromage(1e-2),
    "identity": optax.identity,
    "keep_params_nonnegative": optax.keep_params_nonnegative,
    "normalize_by_update_norm": optax.normalize_by_update_norm,
    "polyak_sgd": optax.polyak_sgd,
    "scale": lambda: optax.scale(0.1),
    "scale_by_backtracking_linesearch": lambda: optax.scale_by_backtracking_linesearch(
        5, store_grad=True
    ),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(0.1),
    "scale_by_param_block_norm": optax.scale_by_param_block_norm,
    "scale_by_param_block_rms": optax.scale_by_param_block_rms,
    "scale_by_polyak": optax.scale_by_polyak,
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda step: 0.1),
    "scale_by_sign": optax.scale_by_sign,
    "scale_by_trust_ratio": optax.scale_by_trust_ratio,
    "scale_by_zoom_linesearch": lambda: optax.scale_by_zoom_linesearch(5),
    "set_to_zero": optax.set_to_zero,
    "sign_sgd": lambda: optax.sign_sgd(0.1),
    "stateless": lambda: optax.stateless(lambda updates, params: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: u),
    "zero_nans": optax.zero_nans,
    "contrib.differentially_private_aggregate": lambda: contrib.differentially_private_aggregate(
        1.0, 0.01, 0
    ),
    "contrib.hutchinson_estimator_diag_hessian": lambda: contrib.hutchinson_estimator_diag_hessian(
        key
    ),
    "contrib.normalize": contrib.normalize,
    "contrib.reduce_on_plateau": contrib.reduce_on_plateau,
}

# What compress refuses.
REFUSED: dict[str, Callable[[], Any]] = {
    "flatten": lambda: optax.flatten(adam),
    "lbfgs": optax.lbfgs,
    "scale_by_lbfgs": optax.scale_by_lbfgs,
    "coat_jax.optax.fp8_adamw": lambda: coat.optax.fp8_adamw(3e-3, storage=STORAGE),
    "coat_jax.optax.compress": lambda: coat.optax.compress(adam, storage=STORAGE),
}
# What is no transformation of updates by itself.
EXCLUDED = {
    "measure_with_ema": "used in optax.monitor, whose state changes its structure in the first "
    "step, so that neither jax.lax.scan nor compress takes it",
}
# Transformations that take some extra arguments and refuse the others.
NEEDED: dict[str, tuple[str, ...]] = {
    "contrib.sam": (),
    "scale_by_backtracking_linesearch": ("value", "grad", "value_fn"),
    "scale_by_zoom_linesearch": ("value", "grad", "value_fn"),
}
PER_EXAMPLE = ("contrib.dpsgd", "contrib.differentially_private_aggregate")


# --- The task --------------------------------------------------------------------------------


def draw(seed: int, *shape: int) -> jax.Array:
    """Gaussian numbers."""
    return jnp.float32(np.random.default_rng(seed).standard_normal(shape))


def start(dtype: Any) -> dict[str, jax.Array]:
    """The network's parameters."""
    params = {
        "up": draw(2, INPUTS, HIDDEN) / 8,
        "up_bias": jnp.zeros(HIDDEN),
        "down": draw(3, HIDDEN, OUTPUTS) / 11,
        "down_bias": jnp.zeros(OUTPUTS),
    }
    return jax.tree.map(lambda p: p.astype(dtype), params)


def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error of the network, computed in FP32."""
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    hidden = jax.nn.gelu(x @ params["up"] + params["up_bias"])
    return jnp.mean(jnp.square(hidden @ params["down"] + params["down_bias"] - y))


X = draw(0, 256, INPUTS)
Y = jnp.tanh(X @ draw(1, INPUTS, OUTPUTS) / 8) + 0.5 * jnp.sin(2 * X[:, :OUTPUTS])


def wrapped(name: str, tx: Any, *, compressed: bool) -> optax.GradientTransformationExtraArgs:
    """The transformation as it is trained, compressed or not."""
    if name.startswith("optax.flatten"):
        return optax.flatten(coat.optax.compress(tx, storage=STORAGE) if compressed else tx)
    if compressed:
        return coat.optax.compress(tx, storage=STORAGE)
    if isinstance(tx, optax.MultiSteps):
        return tx.gradient_transformation()
    return optax.with_extra_args_support(tx)


def initial(name: str, dtype: Any) -> Any:
    """The parameters before the first step."""
    params = start(dtype)
    return optax.LookaheadParams.init_synced(params) if name == "lookahead" else params


def fast(params: Any) -> Any:
    """The parameters that gradients are of."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def step_of(name: str, tx: optax.GradientTransformationExtraArgs) -> Callable[..., Any]:
    """One step on a random batch, and the updates that it made."""

    def step(params: Any, state: Any, seed: jax.Array) -> Any:
        rows = jax.random.randint(jax.random.key(seed), (BATCH,), 0, len(X))

        def loss(params: Any) -> jax.Array:
            return loss_of(params, X[rows], Y[rows])

        value, grads = jax.value_and_grad(loss)(fast(params))
        extra = {"value": value, "loss": value, "grad": grads, "value_fn": loss, "obj_fn": loss}
        if name in NEEDED:
            extra = {argument: extra[argument] for argument in NEEDED[name]}
        given = jax.tree.map(lambda g: g[None], grads) if name in PER_EXAMPLE else grads
        updates, new_state = tx.update(given, state, params, **extra)
        # Some of optax's own states become FP32 in the first step with BF16 parameters.
        new_state = jax.tree.map(
            lambda old, new: new if new.dtype == old.dtype else new.astype(old.dtype),
            state,
            new_state,
        )
        return optax.apply_updates(params, updates), new_state, updates

    return step


def train(name: str, tx: optax.GradientTransformationExtraArgs, dtype: Any) -> float:
    """The loss of the whole task at the end, the mean of some seeds."""
    step = step_of(name, tx)

    def body(carry: Any, seed: jax.Array) -> Any:
        params, state, _ = step(*carry, seed)
        return (params, state), None

    @jax.jit
    def run(seeds: jax.Array) -> jax.Array:
        params = initial(name, dtype)
        (params, _), _ = jax.lax.scan(body, (params, tx.init(params)), seeds)
        slow = params.slow if isinstance(params, optax.LookaheadParams) else params
        return loss_of(slow, X, Y)

    losses = [float(run(jnp.arange(STEPS) + 1000 * seed)) for seed in range(SEEDS)]
    return statistics.mean(losses)


def compressed_leaves(state: Any) -> int:
    """How many leaves are stored in FP8."""
    return sum(leaf.dtype == jnp.float8_e4m3fn for leaf in jax.tree.leaves(state))


def same_updates(name: str, tx: Any, dtype: Any) -> bool:
    """Whether one step is the same with and without compress."""
    updates = []
    for compressed in (False, True):
        chosen = wrapped(name, tx, compressed=compressed)
        params = initial(name, dtype)
        updates.append(jax.jit(step_of(name, chosen))(params, chosen.init(params), jnp.int32(0))[2])
    equal = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), *updates)
    return all(jax.tree.leaves(equal))


def trace(name: str, tx: Any, dtype: Any) -> tuple[Any, Any]:
    """The shapes of a compressed state, before and after a step."""
    ours = wrapped(name, tx, compressed=True)
    params = initial(name, dtype)
    state = jax.eval_shape(ours.init, params)
    return state, jax.eval_shape(step_of(name, ours), params, state, jnp.int32(0))[1]


def row_of(name: str) -> dict[str, Any]:
    """The losses of one transformation."""
    row: dict[str, Any] = {}
    for dtype_name, dtype in DTYPES.items():
        make = TRAINED[name]
        row["compressed_leaves"] = compressed_leaves(trace(name, make(), dtype)[0])
        plain, ours = (wrapped(name, make(), compressed=c) for c in (False, True))
        loss, compressed_loss = (train(name, tx, dtype) for tx in (plain, ours))
        row[dtype_name] = {"loss": loss, "compressed_loss": compressed_loss}
    print(name, row, flush=True)
    return row


def refusal(tx: Any) -> str:
    """What compress says of a transformation that it does not take."""
    try:
        wrapped("", tx, compressed=True).init(start(jnp.float32))
    except ValueError as error:
        return str(error)
    raise AssertionError("compress should have refused this transformation")


def measure() -> dict[str, Any]:
    """Runs everything, on as many processes as there are cores."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        trained = dict(zip(TRAINED, pool.map(row_of, TRAINED), strict=True))
    stateless = {
        name: all(same_updates(name, make(), dtype) for dtype in DTYPES.values())
        for name, make in STATELESS.items()
    }
    links = {
        name: compressed_leaves(trace(name, make(), jnp.float32)[0]) for name, make in LINKS.items()
    }
    refused = {name: refusal(make()) for name, make in REFUSED.items()}
    loss_before = float(loss_of(start(jnp.float32), X, Y))
    return {
        "loss_before": loss_before,
        "steps": STEPS,
        "seeds": SEEDS,
        "trained": trained,
        "links": links,
        "stateless": stateless,
        "refused": refused,
        "excluded": EXCLUDED,
    }


if __name__ == "__main__":
    logging.getLogger("absl").setLevel(logging.ERROR)  # optax.lookahead warns at each init
    records.write(RESULTS, measure())
