"""Conversion keeps parameters, follows rules, and says what it leaves alone."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import coat_jax as coat
from coat_jax import nn, ops

TOKENS = jnp.arange(10).reshape(2, 5)


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


def test_parameters_stay_where_they_were(net):
    before, after = parameters(net), parameters(nn.convert(net))
    assert before.keys() == after.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(value[...], after[path][...])


def test_results_are_near_those_of_the_model_which_is_not_touched(net):
    want = net(TOKENS)
    got = nn.convert(net)(TOKENS)
    assert 0 < jnp.linalg.norm(got - want) < 0.15 * jnp.linalg.norm(want)
    np.testing.assert_array_equal(net(TOKENS), want)


def test_in_full_precision_nothing_changes(net):
    np.testing.assert_array_equal(nn.convert(net, "bf16")(TOKENS), net(TOKENS))


def test_gradients_have_the_structure_and_the_direction_of_the_models(net):
    def gradients(model):
        return nnx.jit(nnx.grad(lambda m: jnp.sum(jnp.sin(m(TOKENS)))))(model)

    exact, rounded = gradients(net), gradients(nn.convert(net))
    assert jax.tree.structure(exact) == jax.tree.structure(rounded)
    a, b = (jnp.concatenate([g.ravel() for g in jax.tree.leaves(t)]) for t in (exact, rounded))
    assert jnp.vdot(a, b) > 0.97 * jnp.linalg.norm(a) * jnp.linalg.norm(b)


def test_what_is_shared_stays_shared(net):
    layers = nn.convert(net).layers
    assert layers[0] is layers[2]


def test_every_layer_is_planned_and_reasons_are_given(net, caplog):
    plan = {d.path: d for d in nn.plan_conversion(net)}
    converted = {path for path, d in plan.items() if d.precision == coat.COAT}
    assert converted == {
        "norm",
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.out",
        "heads",
        "join",
        "layers.0",
        "layers.1",
        "layers.2",
    }
    assert "no FP8 version" in plan["conv"].reason
    with caplog.at_level(logging.INFO, "coat_jax"):
        nn.convert(net)
    assert "left alone: embed (Embed): there is no FP8 version" in caplog.text


def test_the_first_rule_that_matches_wins(net):
    rules = {"layers.1": "bf16", "layers.*": coat.FP8_LINEAR, "att*": "coat_lean"}
    plan = {d.path: d.precision for d in nn.plan_conversion(net, rules=rules)}
    assert plan["layers.1"] is None
    assert plan["layers.0"] == coat.FP8_LINEAR
    assert plan["attention.query"] == coat.COAT_LEAN
    assert plan["norm"] == coat.COAT


def test_a_rule_that_matches_nothing_is_refused_with_what_is_near(net):
    with pytest.raises(ValueError, match=r"No module matches the rule 'layer\.0'.*layers\.0"):
        nn.convert(net, rules={"layer.0": "bf16"})


def test_only_modules_are_converted():
    with pytest.raises(TypeError, match="takes a Flax NNX module, not dict"):
        nn.convert({"a": 1})


def test_modules_with_arithmetic_of_their_own_are_left_alone():
    rngs = nnx.Rngs(0)
    model = nnx.List(
        [
            nnx.Linear(8, 8, dot_general=lambda *args, **kwargs: None, rngs=rngs),
            nnx.Einsum("bsd,bdf->bsf", (2, 8, 8), rngs=rngs),
            nnx.LayerNorm(8, reduction_axes=(0, 1), rngs=rngs),
            nn.Linear(8, 8, rngs=rngs),
        ]
    )
    reasons = [d.reason for d in nn.plan_conversion(model)]
    wanted = ("dot_general of its own", "batch axes", "other axes", "already has a precision")
    assert len(reasons) == len(wanted)
    for reason, part in zip(reasons, wanted, strict=True):
        assert part in reason


@pytest.mark.parametrize("kind", [nnx.RMSNorm, nnx.LayerNorm])
def test_a_converted_norm_keeps_its_epsilon(kind):
    model = nnx.Sequential(kind(32, epsilon=0.5, rngs=nnx.Rngs(0)))
    x = 0.1 * jnp.float32(np.random.default_rng(0).standard_normal((3, 32)))
    # E4M3 rounds to 2^-4 of a value; without its epsilon the norm would be 7 times as large.
    np.testing.assert_allclose(nn.convert(model, coat.COAT)(x), model(x), rtol=0.1, atol=0.01)


def test_linen_takes_the_products():
    x = jnp.float32(np.random.default_rng(0).standard_normal((3, 32)))
    dense = linen.Dense(16, use_bias=False, dot_general_cls=coat.linen.dot_general_cls())
    variables = dense.init(jax.random.key(0), x)
    want = ops.linear(x, variables["params"]["kernel"])
    np.testing.assert_array_equal(dense.apply(variables, x), want)


def test_the_plan_names_the_rule_that_left_a_module_alone(net):
    rules = {"attention.*": "bf16", "norm": "fp8_linear"}
    plan = {d.path: d for d in nn.plan_conversion(net, rules=rules)}
    assert plan["attention.query"].rule == "attention.*"
    assert plan["attention.query"].reason == "its precision, by the rule 'attention.*', is not FP8"
    assert plan["norm"].reason == "its precision, by the rule 'norm', leaves norms unchanged"
    assert plan["heads"].rule is None


def test_a_rule_without_a_match_says_that_rules_are_globs(net):
    with pytest.raises(ValueError, match=r"Rules are globs of whole paths, such as '\*\.query'"):
        nn.plan_conversion(net, rules={"query": "bf16"})


def computes_in_fp8(model, width=32):
    return "f8_e4m3fn" in str(jax.make_jaxpr(model)(jnp.ones((4, width))))


def linear(width=32):
    return nnx.Linear(width, width, rngs=nnx.Rngs(0))


class Holder(nnx.Module):
    """A module with another one in it, in some place."""

    def __init__(self, place, layer):
        self.place, self.layers = place, nnx.data({})
        if place == "a dict":
            self.layers["layer"] = layer
        else:
            self._layer = layer

    def __call__(self, x):
        return (self.layers["layer"] if self.place == "a dict" else self._layer)(x)


@pytest.mark.parametrize("place", ["a dict", "a private attribute"])
def test_layers_are_found_wherever_they_are(place):
    model = Holder(place, linear())
    assert [d.precision for d in nn.plan_conversion(model)] == [coat.COAT]
    assert computes_in_fp8(nn.convert(model))
    assert not computes_in_fp8(model)
    norm = nn.convert(Holder(place, nnx.RMSNorm(32, rngs=nnx.Rngs(0))))
    assert norm(jnp.ones((4, 32))).shape == (4, 32)


def test_a_model_may_be_one_layer():
    assert computes_in_fp8(nn.convert(linear()))
    assert isinstance(nn.convert(nnx.RMSNorm(32, rngs=nnx.Rngs(0))), nn.RMSNorm)
    assert str(nn.plan_conversion(linear())).splitlines()[1].split() == [
        "(the",
        "model)",
        "Linear",
        "FP8",
    ]
    assert not computes_in_fp8(nn.convert(linear(), rules={"*": "bf16"}))


def test_a_norm_with_arithmetic_of_its_own_is_left_alone():
    class Doubled(nnx.RMSNorm):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Renamed(nnx.RMSNorm):
        pass

    x = jnp.ones((4, 32))
    doubled, renamed = (nnx.Sequential(kind(32, rngs=nnx.Rngs(0))) for kind in (Doubled, Renamed))
    np.testing.assert_array_equal(nn.convert(doubled)(x), doubled(x))
    (decision,) = nn.plan_conversion(doubled)
    assert decision.reason == "it is not nnx.RMSNorm itself, and may compute something else"
    assert isinstance(nn.convert(renamed).layers[0], nn.RMSNorm)


@pytest.mark.parametrize("kind", [nnx.RMSNorm, nnx.LayerNorm])
def test_a_converted_norm_keeps_the_dtype_of_its_result(kind):
    norm = nnx.Sequential(kind(32, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert nn.convert(norm)(jnp.ones((4, 32))).dtype == norm(jnp.ones((4, 32))).dtype


@pytest.mark.parametrize("path", ["layers.0", "layers.2"])
def test_rules_cannot_decide_differently_on_one_module(net, path):
    with pytest.raises(ValueError, match=r"layers\.2 is the module layers\.0 itself"):
        nn.convert(net, rules={path: "bf16"})
    both = nn.convert(net, rules={"layers.[02]": "bf16"})
    assert both.layers[2].dot_general is jax.lax.dot_general


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
