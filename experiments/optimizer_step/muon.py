"""Steps of Muon in JAX on all GPUs that are seen, and the matrix products that they need.

products         x x^T, A^2 and B x of every Newton-Schulz step in BF16, and nothing else; every
                 GPU multiplies its equal share of the matrices, without communication
coat fp8_muon    in place, momentum in 8 bits
optax muon       jitted and donated; products in the dtype of its momentum, BF16 or FP32
"""

import math
from argparse import Namespace
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.optax import InPlaceOptimizer, state_shardings
from coat_jax.training.cluster.mesh import make_mesh
from coat_jax.training.compilation import COMMUNICATION, use_one_queue
from coat_jax.training.config import MeshConfig
from experiments.optimizer_step.cases import ITERATIONS, PRODUCTS, Case, matrices
from experiments.optimizer_step.in_jax import Steps, chained
from experiments.timing import median_ms

SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.1, "consistent_rms": 0.2}

Matrices = list[tuple[int, int]]


def muon(case: Case, options: Namespace) -> dict[str, Any]:
    """One of `cases.MUON`."""
    shapes = matrices(options.model, options.layers)
    if case["case"] == PRODUCTS:
        return measure_products(shapes)
    use_one_queue()
    return measure(muon_named(case["case"]), shapes)


def muon_named(name: str) -> Steps:
    """Ours, or optax's with a momentum in BF16 or FP32."""
    if name.startswith("coat"):
        fused = coat.optax.in_place(coat.optax.fp8_muon(**SETTINGS, ns_steps=ITERATIONS))
        return fused.init, fused.step
    dtype = jnp.float32 if "FP32" in name else jnp.bfloat16
    return chained(optax.contrib.muon(**SETTINGS, ns_steps=ITERATIONS, mu_dtype=dtype))


def measure(steps: Steps, shapes: Matrices) -> dict[str, Any]:
    """Time and memory of a step, with parameters sharded by rows."""
    mesh = make_mesh(MeshConfig())
    by_rows = NamedSharding(mesh, P(mesh.axis_names))
    optimizer = InPlaceOptimizer(*steps)
    like = {
        f"matrix_{i}": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=by_rows)
        for i, shape in enumerate(shapes)
    }
    shardings: Any = state_shardings(optimizer, like)  # type: ignore[arg-type]
    state_like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(optimizer.init, like),
        shardings,
    )
    jitted = jax.jit(
        optimizer.step,
        donate_argnums=(0, 2),
        out_shardings=(by_rows, shardings),
        compiler_options=COMMUNICATION if mesh.size > 1 else {},
    )

    def random(seed: int, scale: float) -> Any:
        def one(key: Any, leaf: Any) -> Any:
            sharded = jax.jit(
                lambda key: jax.random.normal(key, leaf.shape, leaf.dtype) * scale,
                out_shardings=leaf.sharding,
            )
            return sharded(key)

        keys = jax.random.split(jax.random.key(seed), len(like))
        return {at: one(key, like[at]) for at, key in zip(like, keys, strict=True)}

    with jax.set_mesh(mesh):
        program = jitted.lower(like, like, state_like).compile()
        params, grads = random(0, 0.02), random(1, 1e-3)
        state = jax.jit(optimizer.init, out_shardings=shardings)(params)

        def run() -> None:
            nonlocal params, state
            params, state = program(params, grads, state)

        def wait() -> None:
            jax.block_until_ready((params, state))

        ms = median_ms(run, wait, warmup=1, batches=5, calls=3)
    return {
        "ms": ms,
        "extra_bytes": program.memory_analysis().temp_size_in_bytes,
        "state_bytes_per_param": sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim)
        / sum(map(math.prod, shapes)),
    }


def measure_products(shapes: Matrices) -> dict[str, Any]:
    """The time of the products alone."""
    devices = jax.devices()
    counts = Counter((min(shape), max(shape)) for shape in shapes)

    @jax.jit
    def products(x: Any, gram: Any) -> Any:
        return x @ x.T, gram @ gram, gram @ x

    def random(shape: tuple[int, int], device: Any) -> Any:
        key = jax.device_put(jax.random.key(0), device)
        return jax.random.normal(key, shape, jnp.bfloat16)

    operands = {
        (m, n): [(random((m, n), device), random((m, m), device)) for device in devices]
        for m, n in counts
    }
    last: list[Any] = []

    def run() -> None:
        for shape, count in counts.items():
            for i in range(ITERATIONS * count):
                at = i % len(devices)
                last[:] = [*last, products(*operands[shape][at])][-len(devices) :]

    def wait() -> None:
        jax.block_until_ready(last)

    return {"ms": median_ms(run, wait, warmup=1, batches=5, calls=3)}
