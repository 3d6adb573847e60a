"""The kernels compile for GPUs that no test runs on: Ada and Blackwell."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attention_to_past_laws import FORMATS, draw
from hopper import COMPILED
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax import ops
from coat_jax.kernels import dispatch, kernel_cache
from experiments.hopper import hopper_mesh, there

pytestmark = COMPILED

D, F = 256, 512
ADA, BLACKWELL = [89], [100, 120]


def layer_loss(x, w, precision):
    how = {"precision": precision, "implementation": "triton"}
    heads = {"head_dim": 128, "rotary": ops.Rotary()}
    x, q, k, v = ops.norm_qkv(x, ops.Norm(w["n"]), (w["q"],) * 3, **heads, **how)
    x = x + ops.attention_linear(q, k, v, w["q"], backend="cudnn", **how)
    y = ops.gated_mlp(x, ops.Norm(w["n"]), w["up"], w["up"], w["down"], **how)
    if precision == coat.COAT:
        two = {name: jnp.stack([w[name]] * 2) for name in ("up", "down")}
        experts, weights = jnp.zeros((128, 1), jnp.int32), jnp.ones((128, 1))
        y += ops.grouped_mlp(x[0], two["up"], two["up"], two["down"], experts, weights, **how)
    return jnp.sum(y.astype(jnp.float32))


def lower_all_kernels(mesh):
    """Lowers a layer's gradient in FP8 and INT8, attention to caches, steps of three optimizers."""

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    weights = {"n": array(D), "q": array(D, D), "up": array(D, F), "down": array(F, D)}
    for precision in (coat.COAT, coat.COAT_INT8):
        gradient = jax.grad(layer_loss, argnums=(0, 1))
        jax.jit(gradient, static_argnums=2).lower(array(1, 128, D), weights, precision)
    for cache in FORMATS:
        stored = jax.eval_shape(lambda cache=cache: draw(2, 128, 2, 4, 64, cache, "bfloat16"))
        q, past, new = jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, P())), stored)
        visible = ops.Visible(past, 0, np.zeros(2, np.int32), 9)
        jax.jit(ops.attention_to_past).lower(q, new, visible)
    for tx in (
        coat.optax.fp8_adamw(1e-3, implementation="triton"),
        coat.optax.fp8_adamw(1e-3, implementation="triton", storage=coat.storage.PAPER),
        coat.optax.compress(optax.sgd(1e-3, momentum=0.9), implementation="triton"),
    ):
        optimizer = coat.optax.in_place(tx)
        state = jax.eval_shape(optimizer.init, weights)
        jax.jit(optimizer.step).lower(weights, weights, state)


@pytest.mark.parametrize("capability", ADA + BLACKWELL)
def test_every_kernel_compiles(capability, tmp_path, monkeypatch):
    """Down to PTX, the GPU's own instructions being `ptxas`' part."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        with there():
            monkeypatch.setattr(dispatch, "gpu_capability", lambda: capability)
            jax.clear_caches()  # of what was traced for another GPU
            mesh = hopper_mesh((1,), ("x",))
            with jax.set_mesh(mesh):
                lower_all_kernels(mesh)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    launches = [kernel_cache.read(path) for path in (tmp_path / "triton").iterdir()]
    assert len(launches) > 34
    for launch in launches:
        assert f".target sm_{capability}".encode() in zlib.decompress(launch)
