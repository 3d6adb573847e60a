"""An activation of one's own is one entry of ACTIVATIONS."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import can_compile_for_hopper, kernel_calls
from ops_cases import draw, quick_jit, weight

import coat_jax as coat
from coat_jax import ops
from coat_jax.kernels.activation import has_kernel
from experiments.hopper import OPTIONS, compile_for, hopper_mesh, there

D, F = 32, 64


def mish(x):
    return x * jnp.tanh(jax.nn.softplus(x))


@pytest.fixture(autouse=True)
def entry(monkeypatch):
    monkeypatch.setitem(ops.ACTIVATIONS, "mish", mish)


def gated(x, gate, up, down, precision, implementation=None):
    return ops.gated_mlp(
        x,
        None,
        gate,
        up,
        down,
        activation="mish",
        precision=precision,
        implementation=implementation,
    )


@pytest.mark.parametrize(("precision", "rtol"), [("bf16", 2**-6), ("coat", 0.15)])
def test_it_is_computed_and_differentiated(precision, rtol):
    x, gate, up, down = draw(1, (2, 3, D)), weight(2, D, F), weight(3, D, F), weight(4, F, D)

    def plain(x, gate, up, down):
        return x + (mish(x @ gate) * (x @ up)) @ down

    def both(function):
        slope = jax.grad(lambda x: jnp.sum(jnp.square(function(x))))
        return quick_jit(lambda x: (function(x), slope(x)))(x)

    got = both(lambda x: gated(x, gate, up, down, precision))
    wanted = both(lambda x: plain(x, gate, up, down))
    for a, b in zip(got, wanted, strict=True):
        assert np.linalg.norm(a - b) < rtol * np.linalg.norm(b)


def test_a_module_takes_it():
    from flax import nnx

    layer = coat.nn.GatedMLP(D, F, activation="mish", rngs=nnx.Rngs(0))
    assert nnx.jit(layer)(draw(1, (2, 3, D))).shape == (2, 3, D)


def test_it_saves_what_other_activations_save():
    """x, gate and up in FP8 blocks."""
    x, gate, up, down = draw(1, (2, 3, D)), weight(2, D, F), weight(3, D, F), weight(4, F, D)

    def saved(activation):
        def pull(x):
            return jax.vjp(
                lambda x: ops.gated_mlp(x, None, gate, up, down, activation=activation), x
            )[1]

        leaves = jax.tree.leaves(jax.eval_shape(pull, x))
        return sorted((leaf.shape, leaf.dtype.name) for leaf in leaves)

    assert saved("mish") == saved("silu")


@pytest.mark.compiled
@pytest.mark.skipif(not can_compile_for_hopper(), reason="needs XLA's CUDA plugin")
def test_beside_the_kernels_it_runs_through_xla():
    assert has_kernel("silu")
    assert not has_kernel("mish")
    shapes = [(2, 256, 512), (512, 1024), (512, 1024), (1024, 512)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def loss(x, gate, up, down):
        y = gated(x, gate, up, down, "coat", "triton")
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    with there():
        program = compile_for(
            hopper_mesh((1,), ("x",)), jax.grad(loss), *arrays, compiler_options=OPTIONS
        )
    assert kernel_calls(program)  # casts
