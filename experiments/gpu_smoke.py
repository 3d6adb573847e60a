"""The smoke benchmark of `gpu_suite`: its workers, each in a process of its own.

With `compile_only` a worker compiles the same programs and runs none of them: the second process,
which finds them in JAX's compilation cache.
"""

import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import coat_jax as coat
from coat_jax import models
from coat_jax.kernels import dispatch
from coat_jax.numerics.expansion import Expanded
from coat_jax.optax.rounding import RoundParams
from coat_jax.storage import Storage
from coat_jax.training.cluster.mesh import make_mesh
from coat_jax.training.compilation import use_cache
from coat_jax.training.config import MeshConfig, OptimizerConfig, TrainConfig
from coat_jax.training.config_files import load_config
from coat_jax.training.setup import prepare
from experiments.layers import Sizes, in_jax
from experiments.random_batch import random_batch
from experiments.timing import median_ms

LAYERS = 4

Figures = dict[str, Any]


def stacks(small: bool, compile_only: bool) -> Figures:
    """Layers in every precision."""
    sizes = Sizes(64, 64, 2, 16) if small else Sizes()
    seconds, milliseconds = {}, {}
    for name, precision in in_jax.PRESETS.items():
        begin = time.perf_counter()
        stack = in_jax.prepare(sizes, LAYERS, precision)
        seconds[name] = time.perf_counter() - begin
        if not compile_only:
            milliseconds[name] = median_ms(stack.step, stack.wait)
    return {"layers": LAYERS, "compile_seconds": seconds, "ms": milliseconds}


def optimizer(small: bool, compile_only: bool) -> Figures:
    """The fused AdamW step, of FP32 and BF16 parameters with BF16 gradients."""
    side = 2**8 if small else 2**14
    seconds, milliseconds = {}, {}
    cases: dict[str, tuple[Any, RoundParams]] = {
        "float32": (jnp.float32, "nearest"),
        "bfloat16": (jnp.bfloat16, "nearest"),
        "bfloat16, stochastic": (jnp.bfloat16, "stochastic"),
    }
    for name, (dtype, how) in cases.items():
        seconds[name], milliseconds[name] = _fused_step(side, dtype, how, compile_only)
    return {"compile_seconds": seconds, "ms": milliseconds}


def _fused_step(
    side: int, dtype: Any, how: RoundParams, compile_only: bool
) -> tuple[float, float | None]:
    """Seconds to compile the step of a square matrix, and milliseconds to run it."""
    adamw = coat.optax.fp8_adamw(1e-4, b2=0.95, weight_decay=0.1)
    fused = coat.optax.in_place(adamw, round_params=how)
    params = jax.random.normal(jax.random.key(0), (side, side), dtype)
    grads = 1e-3 * jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)
    state = fused.init(params)
    begin = time.perf_counter()
    step = jax.jit(fused.step, donate_argnums=(0, 2)).lower(params, grads, state).compile()
    seconds = time.perf_counter() - begin
    if compile_only:
        return seconds, None
    now = [params, state]
    del params, state

    def run() -> None:
        now[:] = step(now[0], grads, now[1])

    return seconds, median_ms(run, lambda: jax.block_until_ready(now))


def training(small: bool, compile_only: bool) -> Figures:
    """One step of the trainer, with kernels and without: how far apart they are."""
    seconds, outcomes = {}, {}
    for name, there in (("triton", True), ("xla", False)):
        # By default XLA leaves out what rounds to FP8 and back.
        options = {} if there or small else {"xla_allow_excess_precision": False}
        with mock.patch.object(dispatch, "triton_installed", return_value=there and not small):
            seconds[name], outcomes[name] = _train_once(options, small, compile_only)
    figures: Figures = {"compile_seconds": seconds}
    if not compile_only:
        ours, theirs = outcomes["triton"], outcomes["xla"]
        figures["apart"] = {
            "loss": abs(ours[0] - theirs[0]) / theirs[0],
            "gradient_norm": abs(ours[1] - theirs[1]) / theirs[1],
            "gradients": _distance(ours[2], theirs[2]),
        }
    return figures


def _train_once(options: Figures, small: bool, compile_only: bool) -> tuple[float, Any]:
    """Seconds to compile; loss, norm of the gradients and first moments after one step."""
    layers, width, sequence = (1, 64, 32) if small else (2, 1024, 1024)
    config = TrainConfig(
        model=models.Config(
            vocab=2048,
            width=width,
            layers=layers,
            heads=width // 64,
            kv_heads=width // 64,
            head_dim=64,
            ffn=11 * width // 4,
            context=sequence,
            precision="coat",
            param_dtype=jnp.bfloat16,
            scan=not small,
        ),
        optimizer=OptimizerConfig(schedule="constant", warmup_steps=0, clip_norm=None, b1=0.0),
        mesh=MeshConfig(data=1, fsdp=1, tensor=1),
        total_steps=1,
        global_batch_size=4,
        sequence_length=sequence,
    )
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        prepared = prepare(config, mesh)
        begin = time.perf_counter()
        program = prepared.lower().compile(options)
        seconds = time.perf_counter() - begin
        if compile_only:
            return seconds, None
        state, report = program(prepared.new_state(), random_batch(config, mesh))
        # With b1 = 0 the first moment is the gradient.
        mu, nu = (
            [Expanded(*stored) for stored in zip(*map(jax.tree.leaves, moment), strict=True)]
            for moment in (state.moments.mu, state.moments.nu)
        )
        gradients = [Storage().read_moments(*pair)[0] for pair in zip(mu, nu, strict=True)]
    return seconds, (float(report.loss), float(report.gradient_norm), jax.device_get(gradients))


def llama2_7b(small: bool, compile_only: bool) -> Figures:
    """The step that a run on one GPU begins with: traced, lowered and compiled, not taken."""
    del compile_only
    config = load_config("llama_tiny" if small else "llama2_7b:one_gpu")
    use_cache(config.cache)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        prepared = prepare(config, mesh)
        jax.block_until_ready(jnp.zeros(()))  # the GPU is there
        begin = time.perf_counter()
        prepared.lower().compile()
        return {"compile_seconds": time.perf_counter() - begin}


def _distance(ours: Any, theirs: Any) -> float:
    """|ours - theirs| / |theirs|, over all gradients."""
    pairs = zip(ours, theirs, strict=True)
    squares = [(np.sum((a - b) ** 2.0), np.sum(b**2.0)) for a, b in pairs]
    off, size = map(sum, zip(*squares, strict=True))
    return float(np.sqrt(off / size))
