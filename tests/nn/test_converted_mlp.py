"""An MLP that a rule names becomes one op, which computes the same and saves less."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import nn, ops

D, F = 32, 64


class Gated(nnx.Module):
    """A gated MLP, as any model may write it."""

    def __init__(self, rngs, act=nnx.silu, residual=False, hidden=F, **linear):
        layer = lambda *sizes: nnx.Linear(*sizes, use_bias=False, rngs=rngs, **linear)  # noqa: E731
        self.norm = nnx.RMSNorm(D, dtype=linear.get("dtype"), rngs=rngs)
        self.w1, self.w2, self.w3 = layer(D, hidden), layer(hidden, D), layer(D, hidden)
        self.act, self.residual = act, residual

    def __call__(self, x):
        n = self.norm(x)
        y = self.w2(self.act(self.w1(n)) * self.w3(n))
        return x + y if self.residual else y


class Plain(nnx.Module):
    """An MLP with biases, its layers in a list, and no norm."""

    def __init__(self, rngs):
        self.steps = nnx.Sequential(
            nnx.Linear(D, F, rngs=rngs), nnx.relu, nnx.Linear(F, D, rngs=rngs)
        )

    def __call__(self, x):
        return x + self.steps(x)


class Model(nnx.Module):
    def __init__(self, *layers):
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def randomized(model):
    """`model` with random biases and scales, which are all 0 or 1 in a new one."""
    graph, state = nnx.split(model)
    rng = np.random.default_rng(5)

    def moved(leaf):
        # In NumPy: JAX compiles a program for each shape.
        noise = rng.standard_normal(leaf.shape, np.float32)
        return jax.device_put(np.asarray(leaf) + np.float32(0.3) * noise)

    return nnx.merge(graph, jax.tree.map(moved, state))


X = jax.device_put(np.random.default_rng(0).standard_normal((3, 5, D), np.float32))


class Listed(nnx.Module):
    """Its layers in a list that is data, with a private name."""

    def __init__(self, rngs):
        self._steps = nnx.data([nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)])

    def __call__(self, x):
        return self._steps[1](nnx.relu(self._steps[0](x)))


FORMS = {
    "silu": (Gated, "layers.0", nn.GatedMLP),
    "gelu, residual": (partial(Gated, act=nnx.gelu, residual=True), "layers.0", nn.GatedMLP),
    "relu, square": (partial(Gated, act=jax.nn.relu, hidden=D), "layers.0", nn.GatedMLP),
    "biases and a sequence": (Plain, "*.steps", nn.MLP),
    "a private list": (Listed, "layers.*", nn.MLP),
}


@pytest.mark.parametrize("name", FORMS)
def test_in_full_precision_it_computes_what_the_module_does(name):
    form, rule, kind = FORMS[name]
    model = randomized(Model(form(nnx.Rngs(0))))
    converted = nn.convert(model, "bf16", rules={rule: kind})
    np.testing.assert_allclose(nnx.jit(converted)(X), nnx.jit(model)(X), rtol=1e-4, atol=1e-4)


def test_a_residual_stream_in_float32_is_not_rounded_to_the_dtype_of_the_layers():
    layer = Gated(nnx.Rngs(0), residual=True, dtype=jnp.bfloat16)
    layer.w2.kernel[...] = jnp.zeros((F, D))
    converted = nn.convert(Model(layer), rules={"layers.0": nn.GatedMLP})
    np.testing.assert_array_equal(nnx.jit(converted)(X), X)


def test_parameters_keep_their_names_values_and_gradients():
    model = Model(Gated(nnx.Rngs(0)), Plain(nnx.Rngs(1)))
    converted = nn.convert(model, rules={"layers.0": nn.GatedMLP, "*.steps": nn.MLP})

    def gradients(model):
        return nnx.jit(nnx.grad(lambda m: jnp.sum(jnp.sin(m(X)))))(model)

    before, after = (nnx.state(m, nnx.Param) for m in (model, converted))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    exact, rounded = map(gradients, (model, converted))
    assert jax.tree.structure(exact) == jax.tree.structure(rounded)
    a, b = (np.concatenate([np.ravel(g) for g in jax.tree.leaves(t)]) for t in (exact, rounded))
    assert np.vdot(a, b) > 0.97 * np.linalg.norm(a) * np.linalg.norm(b)


def test_the_plan_says_which_layer_is_what():
    model = Model(Gated(nnx.Rngs(0), jax.nn.relu), Gated(nnx.Rngs(1)))
    plan = nn.plan_conversion(model, rules={"layers.0": nn.GatedMLP})
    assert (plan[0].roles.gate, plan[0].roles.up, plan[0].roles.down) == ("w1", "w3", "w2")
    assert "layers.0       Gated    FP8, as one op: w2(relu(w1) * w3)" in str(plan)
    assert [d.path for d in plan[1:]] == [f"layers.1.{n}" for n in ("norm", "w1", "w2", "w3")]


class Clamped(nnx.Module):
    """Only large inputs show it."""

    def __init__(self, rngs):
        self.w1, self.w2, self.w3 = (
            nnx.Linear(*shape, use_bias=False, rngs=rngs) for shape in ((D, F), (F, D), (D, F))
        )

    def __call__(self, x):
        return self.w2(jnp.clip(nnx.silu(self.w1(x)) * self.w3(x), -50, 50))


class Dropped(Gated):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.eval()  # in which it does nothing

    def __call__(self, x):
        return self.dropout(super().__call__(x))


class Multiplied(Gated):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.factor = nnx.Variable(jnp.float32(1))

    def __call__(self, x):
        return self.factor[...] * super().__call__(x)


class DoublingNorm(nn.RMSNorm):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Normed(Gated):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = DoublingNorm(D, precision="bf16")


def rounded(arrays, *, dtype):
    return tuple(None if array is None else jnp.round(array) for array in arrays)


class Ungated(Gated):
    def __call__(self, x, mask):
        return super().__call__(x) * mask


def stacked(rngs):
    return nnx.split_rngs(splits=3)(nnx.vmap(Gated))(rngs)


LAYERS = "does not consist of 3 nnx.Linear"
OTHERS = {
    "clamped": (Clamped, "it computes something else from its layers"),
    "dropout": (Dropped, "it has Dropout"),
    "a variable": (Multiplied, "it has factor, a variable that the op does not see"),
    "two inputs": (Ungated, "it cannot be called with one array"),
    "FP8 already": (partial(Gated, dot_general=ops.DotGeneral()), LAYERS),
    "a layer": (partial(nnx.Linear, D, D), LAYERS),
    "a norm's subclass": (Normed, f"{LAYERS} and at most one norm"),
    "its own promotion": (partial(Gated, promote_dtype=rounded), LAYERS),
    "stacked layers": (stacked, r"its layers are stacked, as nnx\.vmap makes them"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_module_that_is_not_such_an_mlp_is_refused_with_the_reason(name):
    make, why = OTHERS[name]
    with pytest.raises(ValueError, match=rf"computes what coat\.nn\.GatedMLP does, but .*{why}"):
        nn.convert(Model(make(rngs=nnx.Rngs(0))), rules={"layers.*": nn.GatedMLP})


# --- What is saved ---------------------------------------------------------------------------


def test_the_plan_counts_what_modules_save_and_names_the_rule_that_saves_more():
    model = Model(Gated(nnx.Rngs(0), dtype=jnp.bfloat16))
    inputs = (jax.ShapeDtypeStruct((2, 48, D), jnp.bfloat16),)
    plan = nn.plan_conversion(model, inputs=inputs)
    assert sum(d.before for d in plan) == nn.saved_bytes(model, *inputs)
    assert sum(d.after for d in plan) == nn.saved_bytes(nn.convert(model), *inputs)
    rules = {"layers.*": nn.GatedMLP}
    converted = nn.plan_conversion(model, inputs=inputs, rules=rules)
    now, best = (sum(d.after for d in p) for p in (plan, converted))
    # The norm's input, gate and up: 1 byte each and an exponent for 16; one FP32 for each row.
    assert best == 2 * 48 * ((D + 2 * F) * 17 // 16 + 4) < now
    assert 'one op. Add to the rules: {"layers.*": coat.nn.GatedMLP}.' in str(plan)
    assert "one op. Add" not in str(converted)


def test_an_array_counts_for_the_module_whose_backward_pass_reads_it():
    model = Model(Gated(nnx.Rngs(0), dtype=jnp.bfloat16))
    plan = {d.path: d for d in nn.plan_conversion(model, inputs=(X.astype(jnp.bfloat16),))}
    rows = 3 * 5
    assert plan["layers.0.w1"].before == 2 * rows * D  # shared with w3
    assert plan["layers.0.w3"].before == 0
    assert plan["layers.0.w2"].before == 2 * rows * F
    assert plan["layers.0.w2"].after == rows * F
    assert plan["layers.0"].reason == "it computes between its modules"
    assert plan["layers.0"].before == plan["layers.0"].after >= 2 * 2 * rows * F


def test_layers_within_jit_and_recomputation_are_found():
    class Nested(Model):
        def __call__(self, x):
            x = nnx.jit(lambda layer, x: layer(x))(self.layers[0], x)
            return nnx.remat(lambda layer, x: layer(x))(self.layers[1], x)

    model = Nested(Gated(nnx.Rngs(0)), nnx.Linear(D, D, rngs=nnx.Rngs(1)))
    plan = {d.path: d for d in nn.plan_conversion(model, inputs=(X,))}
    assert plan["layers.0.w2"].before == 4 * 15 * F
    assert plan["layers.1"].before == 4 * 15 * D


def test_where_no_rule_helps_the_plan_names_functions_that_do():
    class Outer(Model):
        def __call__(self, x):
            return jnp.sin(self.layers[0](x)) * jnp.cos(self.layers[1](x))

    model = Outer(*(nnx.Linear(D, D, rngs=nnx.Rngs(i)) for i in range(2)))
    assert "Use functions of coat.ops there" in str(nn.plan_conversion(model, inputs=(X,)))


def test_a_conversion_that_raises_what_is_saved_is_warned_of(caplog):
    """Three layers share an array in BF16, and each saves a copy of its own in FP8."""

    class Sum(Model):
        def __call__(self, x):
            return sum(layer(x) for layer in self.layers)

    make = partial(nnx.LinearGeneral, D, (2, D // 2), dtype=jnp.bfloat16)
    layers = [make(rngs=nnx.Rngs(i)) for i in range(3)]
    x = jax.ShapeDtypeStruct((4, D), jnp.bfloat16)
    plan = nn.plan_conversion(Sum(*layers), inputs=x)
    assert [(d.before, d.after) for d in plan] == [(8 * D, 4 * D), (0, 4 * D), (0, 4 * D)]
    (warning,) = caplog.records
    assert warning.getMessage().startswith("The conversion raises what is saved")
    assert warning.getMessage() in str(plan)
    nn.plan_conversion(nnx.Sequential(layers[0]), inputs=x)
    assert len(caplog.records) == 1
