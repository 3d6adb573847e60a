"""A layer and its optimizer over explicit axes of real GPUs, against automatic axes and one GPU.

Weights are sharded as a trainer shards them, and the kernels are Triton's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

pytest.importorskip("jax_triton")
import coat_jax as coat
from coat_jax import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs GPUs"),
    pytest.mark.skipif(jax.device_count() < 2, reason="needs several GPUs"),
]

BATCH, SEQUENCE, WIDTH, HIDDEN, HEAD = 8, 256, 512, 1024, 128
WIDENING, NARROWING = ("q", "k", "v", "gate", "up"), ("o", "down")
OPTIMIZERS = {
    "fp8_adamw": lambda: coat.optax.fp8_adamw(1e-3),
    "fp8_muon": lambda: coat.optax.fp8_muon(2e-2),
}


@pytest.fixture(scope="module")
def numbers():
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape):
        return np.asarray(jax.random.normal(next(keys), shape) / shape[0] ** 0.5)

    widths = {"q": WIDTH, "k": WIDTH, "v": WIDTH, "gate": HIDDEN, "up": HIDDEN}
    weights = {name: normal(WIDTH, width) for name, width in widths.items()}
    weights |= {"o": normal(WIDTH, WIDTH), "down": normal(HIDDEN, WIDTH)}
    weights |= {name: np.ones(WIDTH, np.float32) for name in ("n1", "n2")}
    x = np.asarray(jax.random.normal(next(keys), (BATCH, SEQUENCE, WIDTH)))
    return x.astype(jnp.bfloat16), {k: w.astype(jnp.bfloat16) for k, w in weights.items()}


def step_of(tx):
    def loss(weights, x):
        how = {"precision": coat.COAT, "implementation": "triton"}
        qkv, heads = [weights[n] for n in "qkv"], {"head_dim": HEAD, "rotary": ops.Rotary()}
        y, q, k, v = ops.norm_qkv(x, ops.Norm(weights["n1"]), qkv, **heads, **how)
        y = y + ops.attention_linear(q, k, v, weights["o"], **how)
        wide = weights["gate"], weights["up"], weights["down"]
        y = ops.gated_mlp(y, ops.Norm(weights["n2"]), *wide, **how)
        return jnp.mean(jnp.square(y.astype(jnp.float32) - 1))

    @jax.jit
    def step(weights, state, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        updates, state = tx.update(grads, state, weights)
        return value, grads, optax.apply_updates(weights, updates), state

    return step


def trained(numbers, make, mesh):
    """Losses of four steps, the first gradients, and the last weights."""
    x, weights = numbers
    tx = make()
    if mesh is None:
        return run(tx, weights, x)
    specs = {name: P("fsdp", None) for name in WIDENING}
    specs |= {name: P(None, "fsdp") for name in NARROWING} | {"n1": P(), "n2": P()}
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(w, specs[name]) for name, w in weights.items()}
        return run(tx, placed, jax.device_put(x, P("fsdp")))


def run(tx, weights, x):
    step, state, losses, first = step_of(tx), jax.jit(tx.init)(weights), [], None
    for _ in range(4):
        loss, grads, weights, state = step(weights, state, x)
        losses.append(float(loss))
        first = grads if first is None else first
    return losses, first, weights, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_explicit_axes_train_as_automatic_ones_and_as_one_gpu(numbers, name):
    meshes = {
        kind: jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(kind,))
        for kind in (AxisType.Auto, AxisType.Explicit)
    }
    automatic, explicit = (trained(numbers, OPTIMIZERS[name], m) for m in meshes.values())
    alone = trained(numbers, OPTIMIZERS[name], None)
    assert explicit[0][-1] < 0.97 * explicit[0][0]  # something was learnt
    for other in (automatic, alone):
        np.testing.assert_allclose(explicit[0], other[0], rtol=5e-3)
        for leaf, wanted in other[1].items():
            # BF16's rounding, 2^-8, turns codes of gradients, which are 2^-2 apart: 2^-5 for each
            # product, and a gradient passes through a dozen of them.
            assert apart(explicit[1][leaf], wanted) <= 2**-3, leaf
    for leaf in WIDENING + NARROWING:
        spec = P("fsdp", None) if leaf in WIDENING else P(None, "fsdp")
        assert jax.typeof(explicit[2][leaf]).sharding.spec == spec
    # Moments are sharded like their parameters: nothing large is whole anywhere.
    for leaf in jax.tree.leaves(explicit[3]):
        if leaf.size >= WIDTH * WIDTH:
            assert leaf.addressable_shards[0].data.size == leaf.size // jax.device_count()


def apart(a, b):
    """The size of a difference, relative to `b`."""
    a, b = np.float32(a), np.float32(b)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
