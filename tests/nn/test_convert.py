"""Conversion keeps parameters, follows rules, and says what it leaves alone."""

import logging
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import coat_jax as coat
from coat_jax import nn, ops
from coat_jax.errors import UserError

TOKENS = jax.device_put(np.arange(10, dtype=np.int32).reshape(2, 5))


class Net(nnx.Module):
    """One of each kind that Flax has."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(10, 32, rngs=rngs)
        self.norm = nnx.RMSNorm(32, epsilon=1e-3, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.heads = nnx.LinearGeneral(32, (4, 8), rngs=rngs)
        self.join = nnx.Einsum("...nh,nhd->...d", (4, 8, 32), (32,), rngs=rngs)
        shared = nnx.Linear(32, 32, rngs=rngs)
        self.layers = nnx.List([shared, nnx.LayerNorm(32, rngs=rngs), shared])
        self.conv = nnx.Conv(32, 32, (3,), rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.join(self.heads(self.norm(x)))
        x = x + self.attention(x)
        for layer in self.layers:
            x = layer(x)
        return self.conv(x)


@pytest.fixture(scope="module")
def net():
    return Net(nnx.Rngs(0))


def parameters(model):
    return dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))


def results_and_gradients(model):
    def loss(model):
        y = model(TOKENS)
        return jnp.sum(jnp.sin(y)), y

    (_, y), gradients = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(model)
    return y, gradients


def test_parameters_stay_and_results_and_gradients_are_near_those_of_the_model(net):
    before, new = parameters(net), nn.convert(net)
    after = parameters(new)
    assert before.keys() == after.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(value[...], after[path][...])
    (want, exact), (got, rounded) = map(results_and_gradients, (net, new))
    assert 0 < jnp.linalg.norm(got - want) < 0.15 * jnp.linalg.norm(want)
    assert jax.tree.structure(exact) == jax.tree.structure(rounded)
    a, b = (np.concatenate([np.ravel(g) for g in jax.tree.leaves(t)]) for t in (exact, rounded))
    assert np.vdot(a, b) > 0.97 * np.linalg.norm(a) * np.linalg.norm(b)


def test_in_full_precision_nothing_changes(net):
    np.testing.assert_array_equal(nnx.jit(nn.convert(net, "bf16"))(TOKENS), nnx.jit(net)(TOKENS))


def test_a_shared_layer_stays_shared_and_the_model_is_not_touched(net):
    layers = nn.convert(net).layers
    assert layers[0] is layers[2]
    assert net.layers[0] is not layers[0]
    assert not computes_in_fp8(net.layers[0])


def test_every_layer_is_planned_and_reasons_are_given(net, caplog):
    plan = {d.path: d for d in nn.plan_conversion(net)}
    converted = {path for path, d in plan.items() if d.precision == coat.COAT}
    of_attention = {f"attention.{name}" for name in ("query", "key", "value", "out")}
    assert converted == of_attention | {"norm", "heads", "join"} | {f"layers.{i}" for i in range(3)}
    assert "no FP8 version" in plan["conv"].reason
    in_int8 = {d.path: d.becomes for d in nn.plan_conversion(net, coat.COAT_INT8)}
    assert in_int8["layers.0"] == in_int8["attention.query"] == "INT8 and FP8"
    assert in_int8["norm"] == "FP8"
    with caplog.at_level(logging.INFO, "coat_jax"):
        nn.convert(net)
    assert "left alone: embed (Embed): it sums its gradient in float32 already" in caplog.text


def test_a_model_of_which_nothing_is_converted_is_warned_of(caplog):
    model = nnx.Sequential(nnx.Conv(4, 4, (3,), rngs=nnx.Rngs(0)))
    nn.plan_conversion(model, inputs=jax.ShapeDtypeStruct((1, 8, 4), jnp.float32))
    nn.convert(model, "bf16")
    assert not caplog.records
    nn.convert(model)
    (warning,) = caplog.records
    assert warning.getMessage().startswith("Nothing of this Sequential was converted")


def test_the_first_rule_that_matches_wins_and_the_plan_names_it(net):
    rules = {"*.out": "bf16", "layers.*": coat.FP8_LINEAR, "att*": "coat_lean"}
    plan = {d.path: d for d in nn.plan_conversion(net, rules=rules | {"norm": "fp8_linear"})}
    assert plan["attention.out"].precision is None
    assert plan["attention.out"].rule == "*.out"
    assert plan["attention.out"].reason == "its precision, by the rule '*.out', is not FP8"
    assert plan["layers.0"].precision == coat.FP8_LINEAR
    assert plan["attention.query"].precision == coat.COAT_LEAN
    assert plan["norm"].reason == "its precision, by the rule 'norm', leaves norms unchanged"
    assert plan["heads"].rule is None
    assert nn.convert(net, rules={"norm": "coat_lean"}).norm.precision == coat.COAT_LEAN


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("layer.0", r"No module matches the rule 'layer\.0'.*layers\.0"),
        ("query", r"Rules are globs of whole paths, such as '\*\.query'"),
        ("layers.0", r"layers\.2 and layers\.0 are the same module"),
        ("layers.2", r"layers\.2 and layers\.0 are the same module"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(net, rule, said):
    with pytest.raises(ValueError, match=said):
        nn.convert(net, rules={rule: "bf16"})
    both = nn.convert(net, rules={"layers.[02]": "bf16"})
    assert both.layers[2].dot_general is jax.lax.dot_general


class DoubledNorm(nnx.RMSNorm):
    def __call__(self, x):
        return 2 * super().__call__(x)


class DoubledTable(nnx.Embed):
    def __call__(self, tokens):
        return 2 * super().__call__(tokens)


def promoted(arrays, *, dtype):
    return tuple(None if array is None else array.astype(jnp.float32) for array in arrays)


def left_alone():
    """Modules, and why each is left alone."""
    rngs, of_16_bits = nnx.Rngs(0), {"dtype": jnp.bfloat16}
    own = "it has a promote_dtype of its own"
    return [
        (nnx.Linear(8, 8, dot_general=lambda *_, **__: None, rngs=rngs), "dot_general of its own"),
        (nnx.Einsum("bsd,bdf->bsf", (2, 8, 8), rngs=rngs), "batch axes"),
        (nnx.LayerNorm(8, reduction_axes=(0, 1), rngs=rngs), "other axes"),
        (nnx.RMSNorm(8, promote_dtype=promoted, rngs=rngs), own),
        (nnx.LayerNorm(8, promote_dtype=promoted, rngs=rngs), own),
        (DoubledNorm(8, rngs=rngs), "it is not nnx.RMSNorm itself, and may compute something else"),
        (DoubledTable(8, 8, **of_16_bits, rngs=rngs), "it is not nnx.Embed itself, and may"),
        (nn.Linear(8, 8, rngs=rngs), "already has a precision"),
        (nn.Embed(8, 8, **of_16_bits, rngs=rngs), "it sums its gradient in FP32 already"),
    ]


def test_modules_that_may_compute_something_else_are_left_alone():
    modules, reasons = zip(*left_alone(), strict=True)
    model = nnx.List(modules)
    for decision, reason in zip(nn.plan_conversion(model), reasons, strict=True):
        assert reason in decision.reason
    assert [*map(type, nn.convert(model))] == [*map(type, modules)]


def test_a_converted_model_is_converted_again_and_back(net):
    """Norms keep the precision that they were given: their results are exact in any case."""
    converted = nn.convert(net, coat.COAT)
    again, fresh = (nn.convert(model, coat.COAT_INT8) for model in (converted, net))
    y, found = again(TOKENS), converted(TOKENS)
    np.testing.assert_array_equal(y, fresh(TOKENS))
    assert np.any(y != found)
    back = nn.convert(converted, "bf16")
    np.testing.assert_allclose(back(TOKENS), net(TOKENS), atol=1e-6)
    plan = {decision.path: decision.becomes for decision in nn.plan_conversion(converted, "bf16")}
    assert plan["heads"] == plan["join"] == "what it was before it was converted"
    assert plan["norm"] == "unchanged: it already has a precision"


def test_linen_takes_the_products():
    x = np.random.default_rng(0).standard_normal((3, 32), np.float32)
    dense = linen.Dense(16, use_bias=False, dot_general_cls=coat.linen.dot_general_cls())
    variables = dense.init(jax.random.key(0), x)
    want = ops.linear(x, variables["params"]["kernel"])
    np.testing.assert_array_equal(dense.apply(variables, x), want)


def test_flaxs_attention_takes_ours_and_saves_less():
    x = jax.random.normal(jax.random.key(0), (2, 64, 32))
    theirs, full, causal = (
        nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), attention_fn=function)
        for function in (
            nnx.dot_product_attention,
            nn.attention_fn("bf16"),
            nn.attention_fn("bf16", causal=True),
        )
    )
    mask = nnx.make_causal_mask(x[..., 0])
    for how in (False, True):
        np.testing.assert_allclose(full(x, is_causal=how), theirs(x, is_causal=how), atol=1e-5)
    np.testing.assert_allclose(causal(x), theirs(x, mask=mask), atol=1e-5)
    assert nn.saved_bytes(full, x) < nn.saved_bytes(theirs, x)
    assert "attention_fn=coat.nn.attention_fn()" in str(nn.plan_conversion(theirs, inputs=x))
    in_linen = linen.MultiHeadDotProductAttention(4, attention_fn=nn.attention_fn("bf16"))
    theirs = linen.MultiHeadDotProductAttention(4)
    variables = theirs.init(jax.random.key(0), x)
    np.testing.assert_allclose(in_linen.apply(variables, x), theirs.apply(variables, x), atol=1e-5)


def test_our_attention_in_flaxs_ignores_nothing():
    q = jnp.ones((1, 4, 2, 8))
    for refused in ({"mask": TOKENS}, {"dropout_rate": 0.1}, {"module": nnx.Module()}):
        with pytest.raises(UserError, match=r"takes neither masks nor dropout"):
            nn.attention_fn()(q, q, q, **refused)
    nn.attention_fn()(q, q, q, mask=None, dropout_rate=0.1, deterministic=True, module=None)


def computes_in_fp8(model, width=32):
    return "f8_e4m3fn" in str(jax.make_jaxpr(model)(jnp.ones((4, width))))


def linear(width=32):
    return nnx.Linear(width, width, rngs=nnx.Rngs(0))


class Private(nnx.Module):
    """A module with another one in an attribute that begins with an underscore."""

    def __init__(self, layer):
        self._layer = layer

    def __call__(self, x):
        return self._layer(x)


class Box(nnx.Pytree):
    def __init__(self, layer):
        self.layer = layer


@flax.struct.dataclass
class Record:
    layer: Any


class Pair(NamedTuple):
    layer: Any
    other: int


CONTAINERS = {
    "nnx.Pytree": Box,
    "nnx.Dict": lambda layer: nnx.Dict(layer=layer),
    "nnx.List": lambda layer: nnx.List([layer]),
    "list": lambda layer: [layer],
    "tuple": lambda layer: (layer,),
    "NamedTuple": lambda layer: Pair(layer, 1),
    "dict": lambda layer: {"layer": layer},
    "FrozenDict": lambda layer: flax.core.FrozenDict(layer=layer),
    "flax.struct.dataclass": Record,
    "a private attribute": Private,
    "a list in an nnx.Pytree": lambda layer: Box(nnx.data([Record(layer)])),
}


def in_a_model(name, layer):
    model = nnx.Module()
    model.held = nnx.data(CONTAINERS[name](layer))
    return model


def layers_in(model):
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Linear)]


@pytest.mark.parametrize("name", CONTAINERS)
def test_layers_are_found_and_norms_replaced_wherever_flax_finds_them(name):
    model = in_a_model(name, linear())
    assert [d.kind for d in nn.plan_conversion(model)] == ["Linear"]
    (layer,) = layers_in(nn.convert(model))
    assert computes_in_fp8(layer)
    assert not any(map(computes_in_fp8, layers_in(model)))
    new = nn.convert(in_a_model(name, nnx.RMSNorm(32, rngs=nnx.Rngs(0))))
    assert any(isinstance(node, nn.RMSNorm) for _, node in nnx.iter_graph(new))


def test_a_model_may_be_one_module():
    assert computes_in_fp8(nn.convert(linear()))
    assert isinstance(nn.convert(nnx.RMSNorm(32, rngs=nnx.Rngs(0))), nn.RMSNorm)
    line = str(nn.plan_conversion(linear())).splitlines()[1]
    assert line.split() == ["(the", "model)", "Linear", "FP8"]
    assert not computes_in_fp8(nn.convert(linear(), rules={"*": "bf16"}))
    table = nnx.Embed(8, 16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    kinds = {name: type(nn.convert(table, name)) for name in ("coat", "fp8_linear", "bf16")}
    assert kinds == {"coat": nn.Embed, "fp8_linear": nn.Embed, "bf16": nnx.Embed}


class Heated(nnx.Linear):
    """With a parameter and a method of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.temperature = nnx.Param(jnp.float32(2))

    def heated(self, x):
        return self.temperature[...] * self(x)


def test_a_subclass_of_a_linear_layer_keeps_what_it_adds():
    model = nnx.Sequential(Heated(32, 32, rngs=nnx.Rngs(0)))
    new = nn.convert(model)
    assert computes_in_fp8(new.layers[0].heated)
    assert parameters(new).keys() == parameters(model).keys()


@pytest.mark.parametrize("kind", [nnx.RMSNorm, nnx.LayerNorm])
def test_a_converted_norm_keeps_epsilon_dtype_interface_and_attributes_of_flax(kind):
    norm = kind(32, epsilon=0.5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    norm.temperature = nnx.Param(jnp.float32(2))
    new = nn.convert(nnx.Sequential(norm)).layers[0]
    assert vars(norm).keys() - vars(new).keys() == set()
    assert parameters(new).keys() == parameters(norm).keys()
    x = 0.1 * np.random.default_rng(0).standard_normal((3, 32), np.float32)
    assert new(x).dtype == norm(x).dtype
    # E4M3 rounds to 2^-4 of a value; without its epsilon the norm would be 7 times as large.
    np.testing.assert_allclose(*map(np.float32, (new(x, mask=None), norm(x))), rtol=0.1, atol=0.01)


class Tables(nnx.Module):
    """Embeddings that compute in BF16, one of them under two paths, and one in FP32."""

    def __init__(self, rngs):
        self.by_dtype = nnx.Embed(8, 16, dtype=jnp.bfloat16, rngs=rngs)
        self.by_dtype.temperature = nnx.Param(jnp.float32(2))
        self.by_param_dtype = nnx.Embed(8, 16, param_dtype=jnp.bfloat16, rngs=rngs)
        self.in_fp32 = nnx.Embed(8, 16, param_dtype=jnp.bfloat16, dtype=jnp.float32, rngs=rngs)
        self.twin = self.by_dtype


NAMES = ("by_dtype", "by_param_dtype", "in_fp32")


def test_embeddings_in_16_bits_become_ours_which_sum_gradients_in_fp32():
    model, tokens = Tables(nnx.Rngs(0)), jnp.zeros(5, jnp.int32)
    new = nn.convert(model)
    assert [type(getattr(new, name)) for name in NAMES] == [nn.Embed] * 2 + [nnx.Embed]
    assert [type(getattr(model, name)) for name in NAMES] == [nnx.Embed] * 3
    assert new.twin is new.by_dtype
    assert vars(new.by_dtype).keys() == vars(model.by_dtype).keys()
    assert parameters(new).keys() == parameters(model).keys()
    for name in NAMES:
        np.testing.assert_array_equal(getattr(new, name)(tokens), getattr(model, name)(tokens))
    plan = nn.plan_conversion(model, rules={"by_param_dtype": "bf16"})
    assert {d.path: d.reason for d in plan} == {
        "by_dtype": "",
        "by_param_dtype": "its precision, by the rule 'by_param_dtype', is not FP8",
        "in_fp32": "it sums its gradient in float32 already",
        "twin": "",
    }
    assert plan[0].becomes in str(plan)


@pytest.mark.parametrize("function", ["convert", "plan_conversion", "freeze", "saved_bytes"])
def test_only_modules_are_accepted(function):
    with pytest.raises(TypeError, match=f"{function} takes a Flax NNX module, not dict"):
        getattr(nn, function)({"a": 1})


def test_modules_that_change_themselves_are_counted():
    """Dropout counts its random numbers, and BatchNorm collects statistics."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(linear(), nnx.Dropout(0.5, rngs=rngs), nnx.BatchNorm(32, rngs=rngs))
    x = jnp.ones((4, 32))
    assert nn.saved_bytes(model, x) > nn.saved_bytes(linear(), x) == x.nbytes
    for inputs in (x, (x,), jax.ShapeDtypeStruct(x.shape, x.dtype)):
        (decision, *_) = nn.plan_conversion(model, inputs=inputs)
        assert decision.before == x.nbytes


def test_a_module_that_holds_the_model_is_no_circle():
    class Child(nnx.Module):
        def __init__(self, model):
            self.model, self.layer = model, linear()

        def __call__(self, x):
            return self.layer(x)

    class Model(nnx.Module):
        def __init__(self):
            self.child, self.itself = Child(self), self

        def __call__(self, x):
            return self.child(x)

    model = nn.convert(Model())
    assert model.child.model is model
    assert [d.path for d in nn.plan_conversion(Model())] == ["child.layer"]
    assert computes_in_fp8(model)
