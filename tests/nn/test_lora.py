"""Adapters on base weights that are frozen in FP8."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import coat_jax as coat

WIDTH, RANK = 128, 128


class Net(nnx.Module):
    def __init__(self, rngs, **kwargs):
        self.inner = nnx.List([nnx.LoRALinear(WIDTH, WIDTH, lora_rank=RANK, rngs=rngs, **kwargs)])
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.inner[0](x)))


@pytest.fixture(scope="module")
def net():
    return Net(nnx.Rngs(0))


def test_a_frozen_model_has_the_values_of_the_model(net):
    x = jax.random.normal(jax.random.key(0), (8, WIDTH))
    ours, theirs = coat.nn.freeze(net), coat.nn.convert(net, rules={"head": "bf16"})
    np.testing.assert_allclose(nnx.jit(ours)(x), nnx.jit(theirs)(x), rtol=1e-4, atol=1e-4)


def test_base_weights_are_fp8_and_no_parameters(net):
    frozen = coat.nn.freeze(net)
    layer = frozen.inner[0]
    assert layer.codes[...].dtype == jnp.float8_e4m3fn
    assert not isinstance(layer.codes, nnx.Param)
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(frozen, nnx.Param))]
    assert shapes.count((WIDTH, WIDTH)) == 2  # the adapter's, of this rank
    assert isinstance(net.inner[0], nnx.LoRALinear)


def test_only_adapters_have_moments_and_move(net):
    model = coat.nn.freeze(net)
    optimizer = nnx.Optimizer(model, coat.optax.fp8_adamw(1e-2), wrt=nnx.LoRAParam)
    x = jax.random.normal(jax.random.key(0), (8, WIDTH))
    before = jax.device_get(nnx.to_pure_dict(nnx.state(model)))

    @nnx.jit
    def step(model, optimizer, x):
        adapters = nnx.DiffState(0, nnx.LoRAParam)
        grads = nnx.grad(lambda m: jnp.mean((m(x) - 1) ** 2), argnums=adapters)(model)
        optimizer.update(model, grads)

    for _ in range(2):  # the first one moves b alone: a has no gradient while b is zero
        step(model, optimizer, x)
    after = jax.device_get(nnx.to_pure_dict(nnx.state(model)))
    moved = {
        jax.tree_util.keystr(path)
        for (path, a), b in zip(
            jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True
        )
        if (a != b).any()
    }
    assert moved == {"['inner'][0]['lora_a']", "['inner'][0]['lora_b']"}
    codes = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"][0]["mu"]["codes"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(codes)} == {"int8"}


def test_codes_are_sharded_as_the_weight_was():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "x"))
    with jax.set_mesh(mesh):
        layer = coat.nn.freeze(Net(nnx.Rngs(0), kernel_init=init)).inner[0]
    assert layer.codes.get_metadata()["out_sharding"] == (None, "x")
    assert layer.codes[...].sharding.spec == PartitionSpec(None, "x")


def lora_linear(kind=nnx.LoRALinear, **settings):
    return kind(WIDTH, WIDTH, lora_rank=4, rngs=nnx.Rngs(0), **settings)


def test_a_model_may_be_one_layer_or_have_it_in_a_dict_or_be_converted():
    class Holder(nnx.Module):
        def __init__(self):
            self.layers = nnx.data({"one": lora_linear()})

    assert isinstance(coat.nn.freeze(lora_linear()), coat.nn.LoRALinear)
    assert isinstance(coat.nn.freeze(Holder()).layers["one"], coat.nn.LoRALinear)
    frozen = coat.nn.freeze(coat.nn.convert(nnx.Sequential(lora_linear()), coat.COAT))
    assert isinstance(frozen.layers[0], coat.nn.LoRALinear)


class Doubled(nnx.LoRALinear):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Heated(nnx.LoRALinear):
    def heated(self, x):
        return 2 * self(x)


def promote_to_bf16(values, dtype=None):
    return tuple(value.astype(jnp.bfloat16) for value in values)


LOST = [
    ({"dot_general": lambda *a, **k: 2 * jax.lax.dot_general(*a, **k)}, "a dot_general of its"),
    ({"promote_dtype": promote_to_bf16}, "a promote_dtype of its own"),
    ({"lora_promote_dtype": promote_to_bf16}, "a promote_dtype of its own"),
    ({"lora_dtype": jnp.bfloat16}, "its dtype is None, but lora_dtype is"),
    ({"preferred_element_type": jnp.float32}, "a preferred_element_type"),
]


def test_what_would_be_lost_is_refused():
    for settings, why in LOST:
        with pytest.raises(ValueError, match=f"nnx.LoRALinear cannot be frozen: .*{why}"):
            coat.nn.freeze(lora_linear(**settings))
    for kind in (Doubled, Heated):
        with pytest.raises(ValueError, match=rf"{kind.__name__} is a subclass of nnx\.LoRALinear"):
            coat.nn.freeze(nnx.Sequential(lora_linear(kind)))
    with pytest.raises(ValueError, match="freeze takes a precision that multiplies in FP8"):
        coat.nn.freeze(lora_linear(), coat.Precision(forward="E3M4"))
    with pytest.raises(ValueError, match=r"has no nnx\.LoRALinear"):
        coat.nn.freeze(nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0))))


def test_the_result_has_the_dtype_that_flax_gives_it():
    narrow = jnp.bfloat16
    for dtype, param_dtype in itertools.product((None, jnp.float32, narrow), (jnp.float32, narrow)):
        of_adapter = {"lora_dtype": dtype, "lora_param_dtype": param_dtype}
        layer = lora_linear(dtype=dtype, param_dtype=param_dtype, **of_adapter)
        frozen = coat.nn.freeze(layer)
        for x in (jax.ShapeDtypeStruct((2, WIDTH), of) for of in (jnp.float32, narrow)):
            assert jax.eval_shape(frozen, x).dtype == jax.eval_shape(layer, x).dtype
