"""A decoder with experts computes the same however it is run, and its routers are kept even."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_cases import AXES, automatic_mesh, batches
from small_model import QUICK, SMALL, filled

import coat_jax as coat
from coat_jax import generation, models, optax, quantization
from coat_jax.errors import UserError
from coat_jax.models import lazy_arrays, vision_language
from coat_jax.optax.muon.matrices import hidden_matrices, matrices_of

EXPERTS = models.Experts(count=4, chosen=2, aux_loss=0.1, z_loss=0.01, bias_rate=0.01)
CONFIG = dataclasses.replace(SMALL, experts=EXPERTS, dtype=jnp.float32)
TOKENS = np.asarray(batches(1))[0]
BATCH = models.Batch(jnp.asarray(TOKENS[:, :-1]), jnp.asarray(TOKENS[:, 1:]))


def variant(experts=None, **changes):
    experts = dataclasses.replace(EXPERTS, **(experts or {}))
    return dataclasses.replace(CONFIG, experts=experts, **changes)


@functools.cache
def parameters():
    return lazy_arrays.parameters_of(filled(CONFIG))


def loss_of(config, mesh=None, batch=BATCH, **how):
    """The loss, and the gradients of parameters, layers stacked."""
    mesh = mesh or jax.sharding.get_mesh()
    with jax.set_mesh(mesh):
        graph, state = nnx.split(lazy_arrays.load(config, parameters()))
        params, rest = nnx.split_state(state, nnx.Param, ...)

        def of(params):
            loss = nnx.merge(graph, params, rest).loss(batch, **how)
            return loss.mean, loss

        gradients, loss = jax.jit(jax.grad(of, has_aux=True), compiler_options=QUICK)(params)
    flat = {path: lazy_arrays.LazyArray(x.shape, x.dtype, x.shape, np.asarray(x[...]).__getitem__)
            for path, x in nnx.to_flat_state(gradients)}  # fmt: skip
    stacked = lazy_arrays.arrange(flat, scan=True)
    return loss, {path: one.whole() for path, one in stacked.items()}


# The rounding of sums in another order: see tests/models/test_llama.py.
@pytest.mark.parametrize(
    "changes", [{"scan": False}, {"remat": "layer"}, {"remat": "layer", "scan": False, **AXES}]
)
def test_scan_remat_and_eight_devices_do_not_change_the_result(changes):
    mesh = automatic_mesh(2, 2, 2) if "axes" in changes else None
    (wanted, gradients), (loss, found) = loss_of(CONFIG), loss_of(variant(**changes), mesh)
    np.testing.assert_allclose(loss.mean, wanted.mean, rtol=1e-6)
    for name, total in wanted.statistics.items():
        np.testing.assert_allclose(loss.statistics[name], total, rtol=1e-5)
    for path, gradient in gradients.items():
        limit = 1e-5 * np.linalg.norm(gradient)
        assert np.linalg.norm(found[path] - gradient) <= limit, path


def test_penalties_are_those_of_all_routers_and_evaluation_leaves_them_out():
    loss, gradients = loss_of(CONFIG)
    plain, _ = loss_of(variant({"aux_loss": 0.0, "z_loss": 0.0}))
    evaluated, _ = loss_of(CONFIG, evaluate=True)
    np.testing.assert_allclose(evaluated.sum, plain.sum, rtol=1e-6)
    penalty = 0.1 * loss.statistics["aux_loss"] + 0.01 * loss.statistics["router_z_loss"]
    np.testing.assert_allclose(loss.sum, plain.sum + penalty, rtol=1e-6)
    assert all(gradient.any() for gradient in gradients.values())
    load = loss.statistics["expert_load"]
    assert load.shape == (CONFIG.layers, EXPERTS.count)
    np.testing.assert_array_equal(load.sum(-1), EXPERTS.chosen * BATCH.tokens.size)
    assert set(loss.scalars) == {"aux_loss", "router_z_loss"}


def test_rows_in_parts_have_the_loss_of_all_rows():
    """Also where a part has fewer labels, and where a row is padding alone."""
    labels = BATCH.labels.at[:3, 5:].set(-100).at[4].set(-100)
    segments = jnp.ones_like(labels).at[4].set(0)
    batch = BATCH._replace(labels=labels, segments=segments)
    whole, _ = loss_of(CONFIG, batch=batch)
    parts = [loss_of(CONFIG, batch=jax.tree.map(lambda x, i=i: x[i : i + 4], batch))[0]
             for i in (0, 4)]  # fmt: skip
    total = jax.tree.map(jnp.add, *parts)
    for one, other in zip(jax.tree.leaves(total), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("scan", [True, False])
def test_biases_follow_the_load(scan):
    model = lazy_arrays.load(variant(scan=scan), parameters())
    load = jnp.array([[8.0, 2, 4, 2], [4, 4, 4, 4]])
    of_layers = [model.layers.mlp] if scan else [layer.mlp for layer in model.layers]
    before = np.stack([mlp.bias[...] for mlp in of_layers]).reshape(2, 4)
    numbers = model.after_step({"expert_load": load})
    after = np.stack([mlp.bias[...] for mlp in of_layers]).reshape(2, 4)
    wanted = [[-0.01, 0.01, 0, 0.01], [0, 0, 0, 0]]
    np.testing.assert_allclose(after - before, wanted, atol=1e-6)
    assert numbers == {"load_imbalance": 2.0}


def test_only_the_experts_of_a_token_count_as_work():
    dense = dataclasses.replace(CONFIG, experts=None, precision="coat")
    sparse = variant(precision="coat")
    more = sparse.work_per_token(32).fp8 - dense.work_per_token(32).fp8
    assert more == 6 * CONFIG.layers * 3 * CONFIG.width * CONFIG.ffn * (EXPERTS.chosen - 1)
    router = sparse.work_per_token(32).wide - dense.work_per_token(32).wide
    assert router == 6 * CONFIG.layers * CONFIG.width * EXPERTS.count


def test_each_expert_is_a_matrix_of_its_own_to_the_optimizers():
    """To Muon, and in the groups of AdamW's moments: with all in one array, and one by one."""
    params = {"gate": jax.random.normal(jax.random.key(0), (2, 3, 64, 128)) / 8}
    (matrix,) = matrices_of(hidden_matrices, params)
    assert (matrix.batch, matrix.inputs, matrix.outputs) == ((0, 1), (2,), (3,))
    grads = jax.tree.map(lambda p: jnp.sin(7 * p), params)
    storage = dataclasses.replace(coat.Storage(), stochastic=False)
    for make in (optax.fp8_adamw, optax.fp8_muon):
        tx = make(1e-2, storage=storage) if make is optax.fp8_adamw else make(1e-2)
        step = jax.jit(lambda p, g, tx=tx: tx.update(g, tx.init(p), p)[0])
        whole = step(params, grads)["gate"]
        alone = step({"gate": params["gate"][1, 2]}, {"gate": grads["gate"][1, 2]})["gate"]
        np.testing.assert_allclose(whole[1, 2], alone, atol=1e-6)


GREEDY = generation.Sampling(temperature=0.0)


def test_text_is_generated_as_the_logits_say():
    config = variant(dtype=jnp.float32)
    model = lazy_arrays.load(config, parameters())
    prompt = TOKENS[0, :7].tolist()
    (new,) = generation.generate(model, [prompt], max_tokens=3, sampling=GREEDY)
    logits = nnx.jit(lambda m, t: m(t))(model, jnp.asarray([prompt + new]))
    assert new == np.argmax(logits[0, 6:-1], axis=-1).tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen": 5}, r"experts.chosen=5 must be at most experts.count=4"),
        ({"count": 0}, "count=0 must be a whole number from 1"),
        ({"scores": "relu"}, "scores='relu' must be 'softmax' or 'sigmoid'"),
        ({"aux_loss": -1.0}, "aux_loss=-1.0 must be a number from 0 to 1"),
    ],
)
def test_experts_refuse(changes, message):
    with pytest.raises(UserError, match=message):
        variant(changes)


def test_what_has_no_experts_says_so():
    with pytest.raises(UserError, match="4 experts in a layer cannot be quantized"):
        quantization.quantize(filled(CONFIG), quantization.Recipe())
    seeing = vision_language.PRESETS["vlm_tiny"]
    decoder = dataclasses.replace(seeing.decoder, experts=EXPERTS)
    with pytest.raises(UserError, match=r"decoder\.experts must be None"):
        dataclasses.replace(seeing, decoder=decoder)
