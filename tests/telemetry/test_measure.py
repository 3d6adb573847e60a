"""What a loss rounds is seen, once and under its name, wherever it is traced."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from model_cases import AXES, automatic_mesh
from quick import OPTIONS
from small_model import SMALL, filled

import coat_jax as coat
from coat_jax import models, ops, telemetry
from coat_jax.kernels import gemm
from coat_jax.telemetry.tensors import report, sums_and_gradients

OF_ATTENTION = {
    "input",
    *(f"{w}/{t}" for w in ("query", "key", "value", "out") for t in ("weight", "gradient")),
    "out/input",
}
OF_MLP = {
    "input",
    *(f"{w}/{t}" for w in ("gate", "up", "down") for t in ("weight", "gradient")),
    "down/input",
}
PRODUCTS = {f"attention/{t}" for t in OF_ATTENTION} | {f"mlp/{t}" for t in OF_MLP}
BLOCKS = {"attention/saved", "mlp/saved", "mlp/gate/saved", "mlp/up/saved"}
LEAN = {f"attention/{w}/saved" for w in ("query", "key", "value", "out")}
# After layers and of heads: layers begin with products, of which attention's saves its input alone.
MORE_NORMS = {"norms": "after", "qk_norm": "all"}
OF_MORE_NORMS = (BLOCKS - {"attention/saved"}) | {
    "attention_norm/saved",
    "mlp_norm/saved",
    "attention/query_norm/saved",
    "attention/key_norm/saved",
}
UNROLLED = {"precision": "coat", "dtype": jnp.float32, "scan": False}
TOKENS = jax.device_put(np.arange(4 * 32, dtype=np.int32).reshape(4, 32) * 7 % 256)


def model_of(**changes):
    return dataclasses.replace(SMALL, **UNROLLED | changes)


@functools.cache
def measured(config, mesh=None):
    """What `measure` finds of a model's loss, compiled quickly."""
    model = filled(dataclasses.replace(config, scan=False), mesh=mesh)
    graph, params = nnx.split(model)
    if config.scan:
        graph, abstract = models.abstract(config, mesh=mesh)
        params = stacked(params, like=abstract)

    def loss(params, tokens):
        return nnx.merge(graph, params).loss(models.Batch(tokens, tokens)).mean

    rows = None if mesh is None else NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    program = jax.jit(partial(sums_and_gradients, loss), compiler_options=OPTIONS)
    sums, _ = program(params, jax.device_put(TOKENS, rows))
    return report(jax.device_get(sums))


def stacked(params, like):
    """The parameters of an unrolled model as those of one that scans, sharded as `like` is."""
    pure = nnx.to_pure_dict(params)
    pure["layers"] = jax.tree.map(lambda *leaves: np.stack(leaves), *pure["layers"].values())
    pairs = zip(jax.tree.leaves(pure), jax.tree.leaves(like), strict=True)
    placed = [jax.device_put(array, leaf.sharding) for array, leaf in pairs]
    return jax.tree.unflatten(jax.tree.structure(like), placed)


def in_layers(names, layers):
    return {f"layers/{i}/{name}" for i in range(layers) for name in names}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("precision", "changes", "of_layer", "others"),
    [
        ("bf16", {}, set(), set()),
        ("fp8_linear", {}, PRODUCTS, set()),
        ("coat_lean", {}, PRODUCTS | BLOCKS | LEAN, {"norm/saved"}),
        ("coat_int8", {}, PRODUCTS | BLOCKS, {"norm/saved"}),
        ("coat_int8", MORE_NORMS, PRODUCTS | OF_MORE_NORMS, {"norm/saved"}),
        # Whose program other tests need, too.
        ("coat", {"layers": 2}, PRODUCTS | BLOCKS, {"norm/saved"}),
    ],
    ids=["bf16", "fp8_linear", "coat_lean", "coat_int8", "more_norms", "coat"],
)
def test_all_that_a_precision_rounds_has_a_name(precision, changes, of_layer, others):
    config = model_of(precision=precision, **{"layers": 1} | changes)
    found = measured(config)
    assert set(found) == in_layers(of_layer, config.layers) | others
    for name, statistics in found.items():
        assert statistics.saturated == 0, name
        in_int8 = precision == "coat_int8" and name.endswith(("input", "weight"))
        # In INT8 half a step of a row is 1 / 254 of its largest number, whatever the others are.
        assert statistics.underflow < (0.1 if in_int8 else 0.01), name
        assert 0 <= statistics.headroom < 4, name
        # E4M3 rounds within 2^-4 of a value and E5M2 within 2^-3; evenly spread, a bit less than
        # half of that. What is multiplied may have been rounded before, to codes of the same kind.
        # Stochastic rounding goes twice as far.
        most = 2.0**-3 if name.endswith(("gradient", "saved")) else 2.0**-4
        assert statistics.error < 0.55 * most, name
        if in_int8:
            # A row has a few hundred numbers, of which the largest is four deviations long.
            assert statistics.error < 1.3 * 4 / 127 / 12**0.5, name
            assert statistics.headroom == statistics.subnormal == 0


def test_scanned_and_recomputed_layers_are_seen_once_on_a_mesh():
    """Not once per pass, of which a recomputed scan has two, nor once per device.

    The numbers are those of layers that are neither, but for codes on the edge.
    """
    mesh = automatic_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        found = measured(model_of(remat="layer", scan=True, **AXES), mesh)
    wanted = measured(model_of())
    assert set(found) == set(wanted)
    for name, numbers in wanted.items():
        np.testing.assert_allclose(found[name], numbers, rtol=0.02, atol=2e-3, err_msg=name)
    assert found["layers/0/mlp/gate/weight"] != found["layers/1/mlp/gate/weight"]


def test_layers_that_save_their_input_alone_are_seen_in_the_backward_pass():
    """Whose values differ, since layers begin with a rounded input, which they save as it is."""
    found = measured(model_of(remat="layer_fp8", scan=True))
    wanted = measured(model_of())
    assert set(found) == set(wanted) | {"recompute/saved"}
    for name in wanted:
        assert found[name].error == pytest.approx(wanted[name].error, rel=0.2, abs=0.04), name


# --- Planted problems ------------------------------------------------------------------------


def test_a_gradient_that_underflows_is_seen():
    """30 of 100 outputs have a gradient 2^40 times smaller, which E5M2 cannot hold beside 1."""
    weights = jnp.ones((32, 100)) / 32
    dy = jnp.where(jnp.arange(100) < 30, 2.0**-40, 1.0)

    def loss(w, x):
        return jnp.sum(ops.linear(x, w) * dy)

    found = telemetry.measure(loss, weights, jnp.ones((8, 32)))
    assert found["linear/gradient"].underflow == pytest.approx(0.3)
    assert found["linear/weight"].underflow == 0
    assert found["linear/input"].error == 0


def test_a_tensor_that_saturates_is_seen(monkeypatch):
    """Where the largest magnitude is taken for a quarter of what it is."""
    true = gemm.largest_magnitude
    monkeypatch.setattr(gemm, "largest_magnitude", lambda x: true(x) / 4)
    x = jnp.full((4, 32), 448.0).at[:, :8].set(1.0)
    found = telemetry.measure(lambda w, x: jnp.sum(ops.linear(x, w)), jnp.eye(32), x)
    assert found["linear/input"].saturated == pytest.approx(0.75)
    assert found["linear/input"].headroom == pytest.approx(-2)


def test_a_bound_that_an_outlier_makes_loose_is_seen():
    """A norm's scale has one large number, for a column in which its input is zero."""
    x = jnp.ones((4, 64)).at[:, 0].set(0.0)
    weights = jnp.ones((64, 16))

    def loss(scale, x):
        norm = ops.Norm(jnp.ones(64).at[0].set(scale))
        return jnp.sum(ops.norm_linear(x, norm, weights))

    tight, loose = (telemetry.measure(loss, scale, x) for scale in (1.0, 2.0**12))
    name = "norm_linear/input"
    assert loose[name].headroom == pytest.approx(tight[name].headroom + 12, abs=1)
    assert loose[name].subnormal == 1.0 > tight[name].subnormal


# --- How it is called ------------------------------------------------------------------------


X = jnp.ones((4, 32))
OF_LINEAR = {"linear/input", "linear/weight", "linear/gradient"}


def layer_loss(w, x):
    return jnp.mean(ops.linear(x, w) ** 2)


def test_programs_with_and_without_telemetry_are_apart():
    """A function that is traced before, between and after keeps its own program; both stay."""
    layer, w = jax.jit(ops.linear), jnp.eye(32)
    traced = []

    def loss(w, x):
        traced.append(1)
        return jnp.sum(layer(x, w))

    before = layer.lower(X, w).as_text()
    first = jax.grad(loss)(w, X)
    assert set(telemetry.measure(loss, w, X)) == OF_LINEAR
    assert layer.lower(X, w).as_text() == before
    np.testing.assert_array_equal(jax.grad(loss)(w, X), first)
    times = len(traced)
    assert set(telemetry.measure(loss, w, 2 * X)) == OF_LINEAR
    assert len(traced) == times


def test_an_op_that_a_scan_or_vmap_repeats_is_one_tensor():
    """Half of its uses lose a quarter of the weights."""
    small = jnp.ones((32, 32)).at[:8].set(2.0**-30)
    weights = jnp.stack([small, jnp.ones((32, 32))])

    def scanned(weights, x):
        y, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(ops.linear)(x, w), None), x, weights)
        return jnp.sum(y)

    def mapped(weights, x):
        return jnp.sum(jax.vmap(ops.linear, in_axes=(None, 0))(x, weights))

    for loss in (scanned, mapped):
        found = telemetry.measure(loss, weights, X)
        assert found["linear/weight"].underflow == pytest.approx(1 / 8)


def test_two_ops_do_not_share_a_name():
    def loss(w, x):
        y = ops.linear(ops.linear(x, w), w)
        with telemetry.named("head"):
            return jnp.sum(ops.linear(y, (w, w))[0])

    found = {name.rpartition("/")[0] for name in telemetry.measure(loss, jnp.eye(32), jnp.eye(32))}
    assert found == {"linear", "linear_1", "head", "head/0", "head/1"}


def test_modules_of_other_frameworks_are_seen():
    """DotGeneral is what Flax's own layers are given."""
    linear = nnx.Linear(32, 16, dot_general=ops.DotGeneral(), rngs=nnx.Rngs(0))
    graph, params = nnx.split(linear)
    found = telemetry.measure(lambda params, x: jnp.sum(nnx.merge(graph, params)(x)), params, X)
    assert set(found) == OF_LINEAR


def test_a_loss_may_come_with_other_results_or_without_fp8():
    def in_bf16(w, x):
        return jnp.sum(ops.linear(x, w, precision=coat.BF16))

    w = jnp.eye(32)
    found = telemetry.measure(lambda w, x: (layer_loss(w, x), {"norm": x}), w, X)
    assert found == telemetry.measure(layer_loss, w, X)
    assert telemetry.measure(in_bf16, w, X) == {}


def test_a_function_that_is_recomputed_is_seen_and_what_it_saves():
    again = ops.recompute(lambda x, w: ops.linear(x, w))  # noqa: PLW0108
    found = telemetry.measure(
        lambda w, x: jnp.sum(again(x, w)), jnp.eye(32), jnp.full((4, 32), 1.0625)
    )
    inside = {"linear/input", "linear/weight", "linear/gradient"}
    assert set(found) == {"recompute/saved", *inside}
    assert found["recompute/saved"].error == pytest.approx(0.0625 / 1.0625)


def test_gradients_are_those_without_probes():
    w = jnp.linspace(-1, 1, 32 * 32).reshape(32, 32)
    _, grads = jax.jit(partial(sums_and_gradients, layer_loss))(w, X)
    np.testing.assert_array_equal(grads, jax.jit(jax.grad(layer_loss))(w, X))


def test_an_activation_in_a_simulated_format_is_seen():
    precision = coat.Precision(forward="E3M2", backward="E4M1")
    found = telemetry.measure(lambda x: jnp.sum(ops.activate(x, precision=precision)), X)
    assert {name.rpartition("/")[2] for name in found} == {"saved"}
