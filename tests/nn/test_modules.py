"""The modules are the ops with parameters: shapes, gradients, shardings, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import coat_jax as coat
from coat_jax import nn, ops
from coat_jax.errors import UserError

WIDTH, HEADS = 32, 4
X = jax.device_put(np.float32(np.random.default_rng(0).standard_normal((2, 12, WIDTH))))
AXES = nn.MeshAxes("fsdp", "tensor")


def block(precision=coat.COAT, *, axes=nn.MeshAxes(), **attention):  # noqa: B008
    rngs = nnx.Rngs(0)
    shared = {"precision": precision, "axes": axes, "rngs": rngs}
    return nn.TransformerBlock(
        nn.Attention(
            WIDTH,
            HEADS,
            norm=nn.RMSNorm(WIDTH, precision=precision),
            rotary=ops.Rotary(),
            **shared,
            **attention,
        ),
        nn.GatedMLP(WIDTH, 80, norm=nn.RMSNorm(WIDTH, precision=precision), **shared),
    )


def computed(model, *args):
    """In one program: eagerly each operation would be compiled by itself."""
    return nnx.jit(model)(*args)


def test_linear_is_the_op_of_its_parameters():
    layer = nn.Linear(WIDTH, 24, rngs=nnx.Rngs(0))
    layer.bias[...] = layer.bias[...] + 0.5
    want = jax.jit(ops.linear)(X, layer.kernel[...], layer.bias[...])
    np.testing.assert_array_equal(computed(layer, X), want)
    assert nn.Linear(WIDTH, 24, use_bias=False, rngs=nnx.Rngs(0)).bias is None


def test_an_initializer_draws_in_fp32_whatever_the_dtype_of_the_parameter():
    """Also one of another library, of which jax.nn.initializers are the usual ones."""
    for init in (nnx.initializers.lecun_normal(), nnx.initializers.uniform(), jax.random.normal):

        def kernel(dtype, init=init):
            layer = nn.Linear(WIDTH, 24, kernel_init=init, param_dtype=dtype, rngs=nnx.Rngs(0))
            return layer.kernel[...]

        for dtype in (jnp.float16, "bfloat16"):
            rounded = kernel(dtype)
            assert rounded.dtype == jnp.dtype(dtype)
            np.testing.assert_array_equal(rounded, kernel(jnp.float32).astype(dtype))


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms_in_full_precision_are_those_of_flax(kind):
    """With their epsilon and their arguments, but without masks."""
    a = getattr(nn, kind)(WIDTH, epsilon=0.5, precision=coat.BF16)
    b = getattr(nnx, kind)(WIDTH, epsilon=0.5, rngs=nnx.Rngs(0))
    a.scale[...] = b.scale[...] = jnp.arange(1.0, WIDTH + 1)
    if kind == "LayerNorm":
        a.bias[...] = b.bias[...] = jnp.arange(WIDTH) / 7
    np.testing.assert_allclose(a(X, mask=None), b(X), rtol=1e-4, atol=1e-4)
    assert a.num_features == WIDTH
    with pytest.raises(UserError, match=r"no mask.*Use Flax's norm.*\{\"\*\.norm\": \"bf16\"\}"):
        a(X, mask=jnp.ones((2, WIDTH), bool))


def test_attention_in_full_precision_is_that_of_the_formula():
    biases = {"qkv_bias": True, "out_bias": True}
    how = {"kv_heads": 2, "precision": "bf16", "rngs": nnx.Rngs(0)}
    layer = nn.Attention(WIDTH, HEADS, residual=False, **biases, **how)
    layer.query_bias[...] = layer.query_bias[...] + 0.3
    layer.out_bias[...] = layer.out_bias[...] - 0.2

    @nnx.jit
    def formula(layer):
        q = (X @ layer.query[...] + 0.3).reshape(2, 12, HEADS, 8)
        k, v = ((X @ w[...]).reshape(2, 12, 2, 8) for w in (layer.key, layer.value))
        k, v = (jnp.repeat(y, 2, axis=2) for y in (k, v))
        scores = jnp.einsum("bsnh,btnh->bnst", q, k) / np.sqrt(8)
        scores = jnp.where(np.tril(np.ones((12, 12), bool)), scores, -jnp.inf)
        o = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores), v)
        return o.reshape(2, 12, WIDTH) @ layer.out[...] - 0.2

    want = formula(layer)
    np.testing.assert_allclose(computed(layer, X), want, rtol=1e-4, atol=1e-5)
    layer.residual = True
    np.testing.assert_allclose(computed(layer, X), X + want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [8, WIDTH])
def test_queries_and_keys_are_normed_per_head_or_all_together(columns):
    norms = {f"{of}_norm": nn.RMSNorm(columns, precision="bf16") for of in ("query", "key")}
    layer = nn.Attention(WIDTH, HEADS, precision="bf16", rngs=nnx.Rngs(0), **norms)
    y = computed(layer, X)
    for weight in (layer.query, layer.key):
        weight[...] = 5 * weight[...]  # a norm takes the size out
    np.testing.assert_allclose(computed(layer, X), y, rtol=1e-3, atol=1e-4)


def test_a_block_in_fp8_is_near_the_block_in_full_precision():
    """Rounding moves each product by some percent."""
    want, got = (computed(block(precision), X) for precision in ("bf16", "coat"))
    assert 0.001 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.1


def test_a_gated_mlp_is_the_op_of_its_settings():
    settings = {"activation": "gelu", "limit": 0.5, "residual": False}
    layer = nn.GatedMLP(WIDTH, 40, rngs=nnx.Rngs(0), **settings)
    weights = (getattr(layer, name)[...] for name in ("gate", "up", "down"))
    want = jax.jit(functools.partial(ops.gated_mlp, **settings))(X, None, *weights)
    np.testing.assert_array_equal(computed(layer, X), want)


def test_norms_after_come_with_the_residual_sum():
    how = {"residual": False, "precision": "bf16", "rngs": nnx.Rngs(0)}
    attention, mlp = nn.Attention(WIDTH, HEADS, **how), nn.GatedMLP(WIDTH, 80, **how)
    norms = [nn.RMSNorm(WIDTH, precision="bf16") for _ in range(2)]
    layer = nn.TransformerBlock(attention, mlp, attention_norm=norms[0], mlp_norm=norms[1])

    @nnx.jit
    def composed(attention, mlp):
        x = X + norms[0](attention(X))
        return x + norms[1](mlp(x))

    want = composed(attention, mlp)
    np.testing.assert_allclose(computed(layer, X), want, rtol=1e-5, atol=1e-5)


def test_parameters_are_sharded_over_the_mesh_that_is_set():
    """A weight that narrows along its columns, unless a shard had less than a group of 128."""
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        layer = nnx.jit(lambda: block(axes=AXES, qkv_bias=True))()
        wide = nn.MLP(2 * 128, 8, axes=AXES, rngs=nnx.Rngs(0))
        odd = nn.MLP(WIDTH, 12, axes=AXES, rngs=nnx.Rngs(0))
    specs = {
        "query": PartitionSpec("fsdp", "tensor"),
        "out": PartitionSpec(("tensor", "fsdp")),
        "query_bias": PartitionSpec("tensor"),
    }
    for name, spec in specs.items():
        assert getattr(layer.attention, name)[...].sharding.spec == spec
    assert layer.mlp.down[...].sharding.spec == PartitionSpec(("tensor", "fsdp"))
    for mlp in (wide, odd):  # 12 rows cannot be divided by 8
        assert mlp.down[...].sharding.spec == PartitionSpec("tensor", "fsdp")


def test_segments_and_positions_reach_attention():
    layer = nnx.jit(block("bf16"))
    packed = jnp.concatenate([X[:1], X[1:]], axis=1)
    segments = jnp.repeat(jnp.arange(2), 12)[None]
    positions = jnp.tile(jnp.arange(12), 2)[None]
    np.testing.assert_allclose(
        layer(packed, positions, segments).reshape(X.shape), layer(X), rtol=1e-4, atol=1e-4
    )


def test_new_weights_have_a_variance_of_one_over_their_inputs():
    """So that outputs are as large as inputs. A deviation over 65,536 draws is right to 0.3 %."""
    inputs, rngs = 256, nnx.Rngs(0)
    attention = nn.Attention(inputs, HEADS, rngs=rngs)
    mlp = nn.GatedMLP(inputs, 512, rngs=rngs)
    weights = [leaf for leaf in jax.tree.leaves(nnx.state((attention, mlp))) if leaf.ndim > 1]
    assert len(weights) == 7
    for weight in weights:
        np.testing.assert_allclose(jnp.std(weight), weight.shape[0] ** -0.5, rtol=0.02)


def attention(**settings):
    return nn.Attention(**{"width": WIDTH, "heads": HEADS, "rngs": nnx.Rngs(0), **settings})


def mlp(kind, **settings):
    return kind(WIDTH, 40, rngs=nnx.Rngs(0), **settings)


def block_with(**norms):
    whole = block()
    return nn.TransformerBlock(whole.attention, whole.mlp, **norms)


A_NORM, OF_FLAX = nn.RMSNorm(WIDTH), nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0))
SWISH, NO_NORM = "activation='swish' must be one of", r"norm is a flax\..*RMSNorm, and must be a"
NO_BATCH = r"takes x \[batch, sequence, width\], not \(12, 32"
REFUSED = [
    (lambda: attention(heads=5), "width=32 must be a multiple of heads=5"),
    (lambda: attention(kv_heads=3), "heads=4 of kv_heads=3"),
    (lambda: attention(heads=0), "heads=0"),
    (lambda: attention(window=0)(X), "window=0 needs"),
    (lambda: attention(window=4, causal=False)(X), "window=4 needs causal=True"),
    (lambda: attention(precision="fp9"), r"There is no precision 'fp9'\. Use one of bf16"),
    (lambda: attention(rotary=10000)(X), "rotary=10000 must be a coat.ops.Rotary"),
    (lambda: attention(window=2.5)(X), "window=2.5 must be a whole number"),
    (lambda: attention(norm=None)(X[0]), NO_BATCH),
    (lambda: attention(norm=A_NORM)(X[0]), NO_BATCH),
    (lambda: attention(key_norm=nnx.LayerNorm(8, rngs=nnx.Rngs(0))), "key_norm is a flax"),
    (lambda: mlp(nn.GatedMLP, activation="swish")(X), SWISH),
    (lambda: mlp(nn.MLP, activation="swish")(X), SWISH),
    (lambda: mlp(nn.GatedMLP, norm=OF_FLAX), NO_NORM),
    (lambda: mlp(nn.MLP, norm=OF_FLAX), NO_NORM),
    (lambda: block_with(mlp_norm=A_NORM), "GatedMLP has residual=True, and there is a norm aft"),
    (lambda: block_with(attention_norm=A_NORM), "Attention has residual=True, and there is a norm"),
    (lambda: nn.MeshAxes(fsdp=3), "fsdp=3 must be text or None"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_settings_are_checked(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
