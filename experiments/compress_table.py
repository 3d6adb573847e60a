"""Every optimizer and wrapper of optax through `coat.optax.compress`: what works, and how well.

    python -m experiments.compress_table

Each is trained twice on a small regression, as it is and compressed, with FP32 and with BF16
parameters; the figure is the loss after 200 steps, the mean of three seeds. A network of 64 x 128
weights has one leaf that is large enough for FP8. Transformations that store no moment are run
for one step, whose updates must be the same bit for bit. Results: results/compress_table.json,
and the table in docs/compressed_optax.md.
"""

import concurrent.futures
import logging
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import coat_jax as coat
from experiments import records
from experiments.command import RESULTS, bare_parser_of
from experiments.compress_cases import (
    EXCLUDED,
    LINKS,
    NEEDED,
    PER_EXAMPLE,
    REFUSED,
    STATELESS,
    STORAGE,
    TRAINED,
)

FILE = RESULTS / "compress_table.json"
STEPS, BATCH, SEEDS = 200, 64, 3
INPUTS, HIDDEN, OUTPUTS = 64, 128, 8
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


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


def train(name: str, tx: optax.GradientTransformationExtraArgs, dtype: Any) -> float | None:
    """The loss of the whole task at the end, the mean of some seeds; None if it is not finite."""
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
    loss = statistics.mean(losses)
    return loss if math.isfinite(loss) else None


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
    return {
        "loss_before": float(loss_of(start(jnp.float32), X, Y)),
        "steps": STEPS,
        "seeds": SEEDS,
        "trained": trained,
        "links": links,
        "stateless": stateless,
        "refused": {name: refusal(make()) for name, make in REFUSED.items()},
        "excluded": EXCLUDED,
    }


def main() -> None:
    """Measures, and writes the results; `experiments.published --write` writes the table."""
    bare_parser_of(__doc__).parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)  # optax.lookahead warns at each init
    records.write(FILE, measure())


if __name__ == "__main__":
    main()
