"""What `coat.save_fp8` gives to `jax.checkpoint`: an exact forward pass and residuals in 8 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.numerics.blocks import from_blocks, to_blocks
from coat_jax.ops import saving

X = jax.random.normal(jax.random.key(0), (8, 32))
W = jax.random.normal(jax.random.key(1), (32, 64)) / 6
POLICY = coat.policies.save_fp8("hidden")
FORMATS = {
    "E4M3": {},
    "E4M3, to nearest": {"stochastic": False},
    "E5M2 in blocks of 32": {"dtype": coat.E5M2, "block": 32},
    "INT8": {"dtype": jnp.int8},
    "INT8, to nearest": {"dtype": jnp.int8, "stochastic": False},
}


def layer(x, w, **how):
    """Reads `hidden` three times; the gradient of w needs it, and x."""
    h = coat.save_fp8(jnp.tanh(x @ w), "hidden", **how)
    return x + (jnp.sin(h) * h + h**2) @ w.T


def value_and_gradient(function, *args):
    """Of the sum of squares, with respect to the last argument."""
    loss = lambda *args: jnp.sum(function(*args) ** 2)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=len(args) - 1))(*args)


def residuals(function, *args):
    """The arrays that the gradient needs besides arguments, as text."""
    pull = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
    given = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args)]
    leaves = [leaf for leaf in jax.tree.leaves(pull) if (leaf.shape, leaf.dtype) not in given]
    return sorted(f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in leaves if leaf.ndim)


def error(found, wanted):
    return jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)


@pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS)
def test_the_backward_pass_alone_sees_the_codes(how):
    """And is that of the format: E4M3 has errors of 2^-4 relative, at most, E5M2 twice that."""
    exact = value_and_gradient(layer, X, W)
    in_8_bits = jax.checkpoint(functools.partial(layer, **how), policy=POLICY)
    found = value_and_gradient(in_8_bits, X, W)
    assert found[0] == exact[0]
    bound = {coat.E5M2: 0.12, jnp.int8: 0.02}.get(how.get("dtype"), 0.06)
    assert 0 < error(found[1], exact[1]) < bound


def test_gradients_are_those_at_the_decoded_values():
    c = jax.random.normal(jax.random.key(2), X.shape)
    f = jax.checkpoint(lambda x: jnp.sin(coat.save_fp8(x * 1, "hidden")) * c, policy=POLICY)
    decoded = from_blocks(to_blocks(X, size=16, stochastic=True), size=16)
    gradient = jax.grad(lambda x: jnp.sum(f(x)))(X)
    np.testing.assert_allclose(gradient, c * jnp.cos(decoded), rtol=1e-6)


def test_an_array_is_saved_once_in_8_bits_and_nothing_else_is():
    f = functools.partial(jax.checkpoint, layer)
    codes = ["float8_e4m3fn[8, 64]", "uint8[8, 4]"]
    assert residuals(f(policy=POLICY), X, W) == codes
    assert residuals(f(policy=coat.policies.save_fp8("other")), X, W) == []
    in_int8 = jax.checkpoint(functools.partial(layer, dtype=jnp.int8), policy=POLICY)
    assert residuals(in_int8, X, W) == ["float32[8]", "int8[8, 64]"]
    dots = jax.checkpoint_policies.dots_saveable
    both = coat.policies.save_fp8("hidden", otherwise=dots)
    for policy in (both, jax.checkpoint_policies.save_from_both_policies(dots, POLICY)):
        assert residuals(f(policy=policy), X, W) == ["float32[8, 64]", *codes]


def test_it_has_no_effect_without_a_checkpoint_that_names_it():
    exact = value_and_gradient(
        lambda x, w: x + (jnp.sin(h := jnp.tanh(x @ w)) * h + h**2) @ w.T, X, W
    )
    others = jax.checkpoint(layer), jax.checkpoint(layer, policy=coat.policies.save_fp8("other"))
    for function in (layer, *others):
        jax.tree.map(np.testing.assert_array_equal, value_and_gradient(function, X, W), exact)


@pytest.mark.parametrize("offload", [False, True])
def test_a_scan_over_layers_stacks_codes(offload):
    weights = jnp.stack([W, -W, 2 * W])

    def stack(layer, x, weights):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]

    policy = coat.policies.save_fp8("hidden", offload=offload)
    in_8_bits = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    found = value_and_gradient(functools.partial(stack, in_8_bits), X, weights)
    exact = value_and_gradient(functools.partial(stack, layer), X, weights)
    assert found[0] == exact[0]
    assert error(found[1], exact[1]) < 0.06
    saved = residuals(functools.partial(stack, in_8_bits), X, weights)
    assert saved == ["float32[3, 8, 32]", "float8_e4m3fn[3, 8, 64]", "uint8[3, 8, 4]"]


def test_other_transformations_take_it():
    f = jax.checkpoint(layer, policy=POLICY)
    gradient = jax.grad(lambda x, w: jnp.sum(f(x, w)), argnums=1)
    one_by_one = jnp.stack([gradient(x, W) for x in (X, -X)])
    mapped = jax.vmap(gradient, (0, None))(jnp.stack([X, -X]), W)
    assert error(mapped, one_by_one) < 0.06  # another place, and so other random bits
    last = jax.vmap(gradient, (-1, None))(jnp.stack([X, -X], axis=-1), W)
    np.testing.assert_allclose(last, mapped, rtol=1e-5, atol=1e-5)
    for function in (f, jax.checkpoint(f, policy=POLICY)):
        value, tangent = jax.jvp(lambda w, f=function: f(X, w), (W,), (W,))
        want = jax.jvp(lambda w: layer(X, w), (W,), (W,))
        np.testing.assert_array_equal(value, want[0])
        np.testing.assert_allclose(tangent, want[1], rtol=1e-5, atol=1e-5)
    twice = jax.checkpoint(lambda x, w: f(f(x, w), w), policy=POLICY)
    assert residuals(twice, X, W) == 2 * ["float8_e4m3fn[8, 64]"] + 2 * ["uint8[8, 4]"]
    for twice in (jax.hessian, lambda f: jax.grad(jax.grad(f))):
        with pytest.raises(TypeError, match="differentiated once only"):
            twice(lambda s: jnp.sum(f(X, s * W)))(1.0)


def test_flax_takes_the_policy():
    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(W)

        @functools.partial(nnx.remat, policy=POLICY)
        def __call__(self, x):
            return layer(x, self.w[...])

    _, want = value_and_gradient(jax.checkpoint(layer, policy=POLICY), X, W)
    found = nnx.grad(lambda model: jnp.sum(model(X) ** 2))(Layer())
    np.testing.assert_allclose(found.w[...], want, rtol=1e-4, atol=1e-4)


def test_telemetry_measures_an_array_under_its_name():
    f = jax.checkpoint(layer, policy=POLICY)
    found = coat.telemetry.measure(lambda w: jnp.sum(f(X, w)), W)
    assert set(found) == {"hidden/saved"}
    assert 0.02 < found["hidden/saved"].error < 0.04


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS)
def test_results_do_not_depend_on_the_mesh(how, kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))

    def on_mesh(x, w):
        shardings = [{"out_sharding": spec} if kind == AxisType.Explicit else {} for spec in SPECS]
        h = coat.save_fp8(jnp.tanh(jnp.matmul(x, w, **shardings[0])), "hidden", **how)
        return x + jnp.matmul(jnp.sin(h), w.T, **shardings[1])

    want = value_and_gradient(
        jax.checkpoint(
            lambda x, w: x + jnp.sin(coat.save_fp8(jnp.tanh(x @ w), "hidden", **how)) @ w.T,
            policy=POLICY,
        ),
        X, W,
    )  # fmt: skip
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((X, SPECS[1]), (W, OF_W)))
        found = value_and_gradient(jax.checkpoint(on_mesh, policy=POLICY), x, w)
    np.testing.assert_allclose(found[0], want[0], rtol=1e-6)
    # A sum in another order may round to the neighbouring code.
    assert error(jnp.asarray(np.asarray(found[1])), want[1]) < 1e-3


SPECS, OF_W = (P("data", "model"), P("data", None)), P(None, "model")


def test_inside_shard_map_each_device_rounds_its_own_shard():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    in_8_bits = jax.checkpoint(functools.partial(layer, stochastic=False), policy=POLICY)
    with jax.set_mesh(mesh):
        sharded = jax.shard_map(in_8_bits, in_specs=(P("data"), P()), out_specs=P("data"))
        found = value_and_gradient(sharded, X, W)
    want = value_and_gradient(in_8_bits, X, W)
    np.testing.assert_allclose(found[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], want[1], rtol=1e-4, atol=1e-5)


def test_without_jaxs_private_interface_only_this_is_refused(monkeypatch):
    """The other tests here fail if JAX moves it."""
    monkeypatch.setattr(saving, "MISSING", "cannot import name 'ensure_enum'")
    with pytest.raises(UserError, match=r"JAX 0.10 to 0.12, and this is .*'ensure_enum'"):
        coat.save_fp8(X, "hidden")


def test_what_cannot_be_saved_is_refused():
    for args, kind, words in (
        ((jnp.ones((2, 3), jnp.int32), "h"), TypeError, "real floats, not with int32"),
        ((X.astype(coat.E4M3), "h"), TypeError, "save_fp8 rounds to FP8 itself"),
        ((jnp.ones(()), "h"), ValueError, "a scalar has none"),
        ((X, 3), TypeError, "takes a name as its second argument, not 3"),
    ):
        with pytest.raises(kind, match=words):
            coat.save_fp8(*args)
    with pytest.raises(UserError, match=r"dtype=.*float16.* Use coat.E4M3, coat.E5M2 or jnp.int8"):
        coat.save_fp8(X, "h", dtype=jnp.float16)
    with pytest.raises(ValueError, match=r"block=24 .*16, 32, 64"):
        coat.save_fp8(X, "h", block=24)
    with pytest.raises(TypeError, match="takes names"):
        coat.policies.save_fp8()
    mesh = jax.make_mesh((4,), ("model",))
    with jax.set_mesh(mesh), pytest.raises(UserError, match=r"32 in 4 shards, .* block=16"):
        coat.save_fp8(jax.device_put(X, P(None, "model")), "h")
