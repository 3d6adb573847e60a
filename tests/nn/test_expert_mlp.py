"""An ExpertMLP is the sum of its experts, and says how it divided the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from coat_jax import nn, ops

WIDTH, HIDDEN, COUNT, CHOSEN = 32, 48, 6, 2
X = jax.device_put(np.float32(np.random.default_rng(0).standard_normal((2, 12, WIDTH))))


def layer_of(**settings):
    norm = nn.RMSNorm(WIDTH, precision="bf16")
    shared = {"precision": "bf16", "rngs": nnx.Rngs(0)} | settings
    return nn.ExpertMLP(WIDTH, HIDDEN, COUNT, chosen=CHOSEN, norm=norm, **shared)


def computed(layer, *args):
    graph, state = nnx.split(layer)
    return jax.jit(lambda state, *args: nnx.merge(graph, state).with_routing(*args))(state, *args)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_result_is_the_weighted_sum_of_the_chosen_experts(scores):
    layer = layer_of(scores=scores, has_bias=True, activation="gelu", limit=0.7)
    layer.bias[...] = jnp.arange(COUNT) / 10
    y, routing = computed(layer, X)
    n = layer.norm(X)
    logits = jnp.matmul(n, layer.router[...], precision="highest")
    experts, weights = ops.route(
        logits, CHOSEN, scores=scores, normalized=True, bias=layer.bias[...]
    )
    wanted = np.array(X)
    for row, token, j in np.ndindex(experts.shape):
        e = experts[row, token, j]
        gate, up = (n[row, token] @ w[...][e] for w in (layer.gate, layer.up))
        gate, up = jnp.minimum(gate, 0.7), jnp.clip(up, -0.7, 0.7)
        of_expert = (jax.nn.gelu(gate, approximate=False) * up) @ layer.down[...][e]
        wanted[row, token] += weights[row, token, j] * of_expert
    np.testing.assert_allclose(y, wanted, atol=1e-5)
    np.testing.assert_array_equal(routing.load, np.bincount(np.ravel(experts), minlength=COUNT))
    balance = ops.balance_loss(logits, experts, scores=scores)
    np.testing.assert_allclose(routing.balance, balance, rtol=1e-5)
    np.testing.assert_allclose(routing.z, ops.router_z_loss(logits), rtol=1e-5)
    np.testing.assert_array_equal(nnx.jit(layer)(X), y)


def test_padding_is_not_part_of_the_load():
    layer, segments = layer_of(), jnp.ones((2, 12), jnp.int32).at[:, 7:].set(0)
    (y, routing), (whole, _) = computed(layer, X, segments), computed(layer, X)
    np.testing.assert_array_equal(y, whole)
    np.testing.assert_array_equal(routing.load, computed(layer, X[:, :7])[1].load)


def test_each_expert_begins_like_an_mlp_of_its_own():
    layer = layer_of(param_dtype=jnp.bfloat16, has_bias=True)
    for weight, inputs in ((layer.gate, WIDTH), (layer.up, WIDTH), (layer.down, HIDDEN)):
        assert weight[...].dtype == jnp.bfloat16
        np.testing.assert_allclose(np.std(np.float32(weight[...])), inputs**-0.5, rtol=0.05)
    assert layer.bias[...].dtype == jnp.float32
    assert not isinstance(layer.bias, nnx.Param)
    with pytest.raises(ValueError, match="from 1 to 2 experts"):
        computed(nn.ExpertMLP(WIDTH, HIDDEN, 2, chosen=3, rngs=nnx.Rngs(0)), X)


def test_each_expert_is_sharded_and_its_tokens_too():
    names = ("fsdp", "expert", "tensor")
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=(AxisType.Auto,) * 3)
    y, routing = computed(layer_of(), X)
    with jax.set_mesh(mesh):
        axes = nn.MeshAxes("fsdp", "tensor", "expert")
        layer = layer_of(axes=axes, batch_axes=("fsdp", "expert"))
        specs = [w[...].sharding.spec for w in (layer.router, layer.gate, layer.down)]
        x = jax.device_put(X, P("fsdp"))
        sharded, found = computed(layer, x)
    columns = ("expert", "tensor")
    assert specs == [P("fsdp"), P(None, "fsdp", columns), P(None, (*columns, "fsdp"), None)]
    np.testing.assert_allclose(sharded, y, atol=1e-5)
    for one, other in zip(found, routing, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
