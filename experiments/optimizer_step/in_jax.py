"""Steps of AdamW, of coat_jax and of optax."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

import coat_jax as coat
from coat_jax.optax.rounding import RoundParams
from experiments.optimizer_step.cases import Case, Shapes, calls, parameters
from experiments.timing import median_ms

SETTINGS = {"learning_rate": 1e-4, "b2": 0.95, "weight_decay": 0.1}

Steps = tuple[Callable[..., Any], Callable[..., Any]]  # init, and step(params, grads, state)


def adamw(case: Case, options: Namespace) -> dict[str, Any]:
    """One of the optimizers of `cases.ADAMW`."""
    shapes = parameters(case["model"], options.elements)
    return measure(adamw_named(case["optimizer"]), shapes, case["params"], case["grads"])


def adamw_named(name: str) -> Steps:
    """AdamW of optax, our chain or our fused step."""
    if name == "optax.adamw":
        return chained(optax.adamw(**SETTINGS))
    if "chain" in name:
        implementation = "xla" if "XLA" in name else None
        return chained(coat.optax.fp8_adamw(**SETTINGS, implementation=implementation))
    how: RoundParams = "stochastic" if "stochastic" in name else "nearest"
    adamw = coat.optax.fp8_adamw(**SETTINGS)
    fused = coat.optax.in_place(adamw, round_params="24_bits" if "24 bits" in name else how)
    return fused.init, fused.step


def chained(tx: optax.GradientTransformation) -> Steps:
    """A step that computes updates and then applies them."""

    # Results in the order of what is donated: XLA pairs buffers of the same shape in order, and
    # copies where parameters would land in the memory of a moment.
    def step(params: Any, grads: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def measure(steps: Steps, shapes: Shapes, param_dtype: str, grad_dtype: str) -> dict[str, Any]:
    """Time and memory of a step."""
    init, step = steps
    keys = jax.random.split(jax.random.key(0), len(shapes))

    @partial(jax.jit, static_argnums=(1, 2, 3))
    def random(key: Any, shape: tuple[int, ...], dtype: str, scale: float) -> Any:
        return jax.random.normal(key, shape, dtype) * scale

    def drawn(dtype: str, scale: float) -> list[jax.Array]:
        return [random(key, at, dtype, scale) for key, at in zip(keys, shapes, strict=True)]

    params, grads = drawn(param_dtype, 1.0), drawn(grad_dtype, 1e-3)
    state = jax.jit(init)(params)
    jitted = jax.jit(step, donate_argnums=(0, 2))
    program = jitted.lower(params, grads, state).compile()
    elements = sum(p.size for p in params)

    def run() -> None:
        nonlocal params, state
        params, state = program(params, grads, state)

    def wait() -> None:
        jax.block_until_ready(params)

    ms = median_ms(run, wait, warmup=1, batches=7, calls=calls(shapes))
    return {
        "ms": ms,
        "extra_bytes": program.memory_analysis().temp_size_in_bytes,
        "state_bytes_per_param": sum(a.nbytes for a in jax.tree.leaves(state) if a.ndim) / elements,
    }
