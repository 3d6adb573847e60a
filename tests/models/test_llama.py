"""What the model computes does not depend on how: in a loop or not, recomputed or kept, cut or
whole, and in FP8 not by much."""

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from model_cases import (
    AXES,
    SMALL,
    answer,
    automatic_mesh,
    batches,
    by_name,
    cosine,
    loss_of,
    trained,
    variant,
)
from small_model import QUICK, filled

import coat_jax as coat
from coat_jax import evaluation, generation, models, nn, ops, quantization
from coat_jax.errors import UserError

TOKENS = jax.device_put(np.asarray(batches(1))[0])
MATRICES = ("query", "key", "value", "out", "gate", "up", "down", "embed", "head")


# --- The same numbers ------------------------------------------------------------------------


def answer_of(mesh=None, **changes):
    """Of the trained model, computed as SMALL with these changes says."""
    return computed(variant(**changes), mesh)


def in_fp32(precision, mesh=None, **changes):
    """The same in FP32, but for what the precision rounds."""
    return answer_of(mesh, precision=precision, dtype=jnp.float32, **changes)


@functools.cache
def computed(config, mesh):
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        return answer(trained(config, mesh), TOKENS)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("precision", "changes", "tolerance"),
    [
        # In FP8 another order of sums may turn a code of one token into its neighbour, which moves
        # the gradients of so small a model by up to 3 %.
        ("coat", {"remat": "layer"}, 4e-2),
        # Sums in another order differ by some 2^-24 times the root of their length.
        ("bf16", {"scan": False, "remat": "layer"}, 1e-5),
    ],
)
def test_scan_remat_and_eight_devices_do_not_change_the_result(precision, changes, tolerance):
    """All at once, in a program that has nothing in common with the plain one."""
    wanted = in_fp32(precision)
    got = in_fp32(precision, automatic_mesh(2, 2, 2), **changes, **AXES)
    np.testing.assert_allclose(got.loss, wanted.loss, rtol=tolerance)
    assert set(got.gradients) == set(wanted.gradients)
    for name, gradient in wanted.gradients.items():
        distance = np.linalg.norm(got.gradients[name] - gradient)
        assert distance < tolerance * np.linalg.norm(gradient), name


@pytest.mark.costly
def test_remat_in_fp8_changes_gradients_by_rounding_alone():
    """COAT rounds what enters its norms anyway: only the stream beside attention is new."""
    wanted, got = (in_fp32(coat.COAT, remat=remat) for remat in (None, "layer_fp8"))
    assert got.loss == wanted.loss
    for name, gradient in wanted.gradients.items():
        assert cosine(got.gradients[name], gradient) > 0.98, name


def test_precision_says_how_remat_in_fp8_rounds():
    """Also where nothing else is rounded."""
    ways = [dataclasses.replace(coat.BF16, stochastic=stochastic) for stochastic in (False, True)]
    to_nearest, at_random = (program_of(precision=how, remat="layer_fp8") for how in ways)
    assert to_nearest != at_random


def program_of(**changes):
    """What XLA would compile for the loss and the gradients of SMALL with these changes."""
    graph, state = models.abstract(variant(**changes))
    gradients = jax.jit(jax.value_and_grad(functools.partial(loss_of, graph)))
    return gradients.lower(state, TOKENS).as_text()


def test_fp8_gives_nearly_the_loss_and_gradients_of_bf16():
    """A gradient is turned by 12 degrees at most, that of COAT_LEAN's first keys."""
    bf16 = in_fp32(coat.BF16)
    for precision in (coat.COAT, coat.COAT_LEAN):
        fp8 = in_fp32(precision)
        assert fp8.loss != bf16.loss
        np.testing.assert_allclose(fp8.loss, bf16.loss, rtol=0.01)
        for name, gradient in bf16.gradients.items():
            if name.split(".")[-1] in MATRICES:
                assert cosine(fp8.gradients[name], gradient) > 0.97, (precision, name)


@functools.cache
def created(config, mesh):
    return models.create(config, seed=3, mesh=mesh)


def test_values_depend_on_the_seed_alone():
    """Neither on scan nor on the mesh, on which each device makes its own shards."""
    mesh = automatic_mesh(2, 2, 2)
    whole = models.Llama(variant(scan=False), rngs=nnx.Rngs(jax.random.key(3)))
    values = by_name(nnx.state(whole))
    cut, apart = (created(variant(scan=scan, **AXES), mesh) for scan in (True, False))
    for model in (cut, apart):
        for name, value in by_name(nnx.state(model)).items():
            # XLA may fuse the last multiplication, which then rounds once.
            np.testing.assert_allclose(value, values[name], rtol=2**-22, err_msg=name)
    assert apart.layers[1].mlp.gate[...].sharding.spec == P("fsdp", "tensor")
    assert not np.array_equal(values["layers.0.mlp.gate"], values["layers.1.mlp.gate"])
    for parameter, spec in (
        (cut.embed, P("tensor", "fsdp")),
        (cut.head, P("fsdp", "tensor")),
        (cut.layers.mlp.gate, P(None, "fsdp", "tensor")),
        (cut.layers.attention.out, P(None, ("tensor", "fsdp"), None)),
    ):
        value = parameter[...]
        assert value.sharding == jax.sharding.NamedSharding(mesh, spec)
        assert value.addressable_shards[0].data.size == value.size // 4
    # As GPT-2's: tied to the head it gives logits near zero.
    np.testing.assert_allclose(np.std(values["embed"]), 0.02, rtol=0.02)


@pytest.mark.costly
@pytest.mark.parametrize("scan", [False, True])
def test_parameters_in_bf16_are_those_in_fp32_rounded(scan):
    config, mesh = variant(scan=scan, **AXES), automatic_mesh(2, 2, 2)
    in_bf16 = dataclasses.replace(config, param_dtype=jnp.bfloat16)
    exact, rounded = (jax.tree.leaves(nnx.state(created(c, mesh))) for c in (config, in_bf16))
    for ours, wanted in zip(rounded, exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        assert ours.sharding == wanted.sharding
        np.testing.assert_array_equal(ours, np.asarray(wanted).astype(jnp.bfloat16))


# --- What tokens see -------------------------------------------------------------------------


def logits_of(model, *args):
    graph, state = nnx.split(model)
    program = jax.jit(lambda s, *a: nnx.merge(graph, s)(*a), compiler_options=QUICK)
    return np.asarray(program(state, *args))


def test_documents_in_one_row_are_as_if_alone():
    """Two documents in the first row; each by itself, with something after it, in the others."""
    first, second, length = TOKENS[0, :13], TOKENS[1, :29], 42
    rows = [jnp.concatenate(pair) for pair in ((first, second), (first, second), (second, first))]
    ranges = jnp.concatenate([jnp.arange(13), jnp.arange(29)]), jnp.arange(length)
    segments = (jnp.arange(length) >= 13).astype(jnp.int32), jnp.zeros(length, jnp.int32)
    packed, before, after = logits_of(
        filled(variant(dtype=jnp.float32)),
        jnp.stack(rows),
        jnp.stack([ranges[0], ranges[1], ranges[1]]),
        jnp.stack([segments[0], segments[1], segments[1]]),
    )
    alone = np.concatenate([before[:13], after[:29]])
    np.testing.assert_allclose(packed, alone, atol=1e-5 * np.abs(alone).max())
    assert np.abs(before[13:] - packed[13:]).max() > 0.1 * np.abs(alone).max()


def test_a_token_outside_the_vocabulary_gives_nan():
    """JAX would make token 1 of 2^32 + 1."""
    model = filled(variant(dtype=jnp.float32, layers=1))
    logits = model(np.array([[1, 2, 256], [1, -1, 3], [2**32 + 1, 2, 3], [1, 2, 255]]))
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(logits).any(axis=(1, 2)), [True, True, True, False])


# --- What is kept ----------------------------------------------------------------------------


def bytes_kept(config):
    """What the backward pass of a loss keeps beside the parameters, in bytes."""
    graph, state = models.abstract(config)
    tokens = jax.ShapeDtypeStruct((4, 33), jnp.int32)

    def pull(state, tokens):
        return jax.vjp(lambda state: loss_of(graph, state, tokens), state)[1]

    kept = jax.tree.leaves(jax.eval_shape(pull, state, tokens))
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in kept)
    return total - sum(math.prod(p.shape) * p.dtype.itemsize for p in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("remat", "bytes_each", "scan"), [("layer", 2, False), ("layer_fp8", 17 / 16, True)]
)
def test_remat_saves_one_activation_for_each_layer(remat, bytes_each, scan):
    few, many = (
        bytes_kept(variant(layers=layers, remat=remat, scan=scan, precision="coat"))
        for layers in (1, 3)
    )
    assert many - few == 2 * (4 * 32 * SMALL.width * bytes_each)


def test_coat_saves_less_than_bf16():
    assert bytes_kept(variant(precision="coat")) < 0.7 * bytes_kept(SMALL)


# What each model's paper and config.json say: parameters, theta, epsilon, context, heads of
# queries and keys and their size, and the window.
PUBLISHED = {
    "tiny": (918_656, None),
    "llama2_7b": (6_738_415_616, (1e4, 1e-5, 4096, (32, 32, 128), None)),
    "llama2_13b": (13_015_864_320, (1e4, 1e-5, 4096, (40, 40, 128), None)),
    "llama_30b": (32_528_943_616, (1e4, 1e-6, 2048, (52, 52, 128), None)),
    "llama3_8b": (8_030_261_248, (5e5, 1e-5, 8192, (32, 8, 128), None)),
    "llama3.1_8b": (8_030_261_248, (5e5, 1e-5, 131072, (32, 8, 128), None)),
    "mistral_7b": (7_241_732_096, (1e4, 1e-5, 32768, (32, 8, 128), 4096)),
    "qwen2_0.5b": (494_032_768, (1e6, 1e-6, 131072, (14, 2, 64), None)),
    "qwen2_7b": (7_615_616_512, (1e6, 1e-6, 131072, (28, 4, 128), None)),
    "qwen3_0.6b": (596_049_920, (1e6, 1e-6, 40960, (16, 8, 128), None)),
    "qwen3_8b": (8_190_735_360, (1e6, 1e-6, 40960, (32, 8, 128), None)),
    "olmo_1b": (1_176_764_416, (1e4, 1e-5, 2048, (16, 16, 128), None)),
    "olmo_7b": (6_888_095_744, (1e4, 1e-5, 2048, (32, 32, 128), None)),
    "olmo2_7b": (7_298_617_344, (5e5, 1e-6, 4096, (32, 32, 128), None)),
    "olmoe_tiny": (1_772_672, None),
    "olmoe_7b": (6_919_161_856, (1e4, 1e-5, 4096, (16, 16, 128), None)),
    "qwen3_30b_a3b": (30_532_122_624, (1e6, 1e-6, 40960, (32, 4, 128), None)),
}


@pytest.mark.parametrize("name", models.PRESETS)
def test_presets_are_the_published_models(name):
    config, (count, rest) = models.PRESETS[name], PUBLISHED[name]
    assert models.parameters_count(config) == count
    heads = config.heads, config.kv_heads, config.head_dim
    shown = config.rotary.theta, config.norm_eps, config.context, heads, config.window
    assert shown == (rest or shown)
    assert (config.rotary.scaling is not None) == (name == "llama3.1_8b")
    assert config.rotary.scaling in (None, ops.Llama3Scaling(8.0, 1.0, 4.0, 8192))


# --- Refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads=3 must be a multiple of kv_heads=2"),
        ({"batch_axes": ("data", "data")}, "must name each axis of the mesh once"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"layers": 0}, "layers=0 must be a whole number from 1 to 10,000"),
        ({"norm": "batch"}, r"norm='batch' must be 'rms' or 'layer'"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 must be a number from 1e-30 to 1. The default is 1e-05"),
        ({"dtype": jnp.float8_e4m3fn}, "dtype=float8_e4m3fn must be float32, bfloat16"),
        ({"param_dtype": jnp.int32}, "param_dtype=int32 must be float32"),
        ({"precision": "fp7"}, "There is no precision 'fp7'"),
        ({"activation": "mish"}, r"activation='mish' must be one of silu, .* to coat.ops.ACTIV"),
        ({"activation_limit": 0}, "activation_limit=0 must be a number above 0 and at most 1e"),
    ],
)
def test_a_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        variant(**changes)


def test_a_seed_is_one_that_jax_tells_from_others():
    for seed in (-1, 2**32, 2**64, 1.5, True, "0", None):
        with pytest.raises(UserError, match=r"seed=.* a whole number from 0 to 4,294,967,295"):
            models.create(variant(), seed=seed)


def test_a_model_of_no_name_is_refused():
    with pytest.raises(TypeError, match=r"not from 'tiny'\. .* coat.models.config_of\("):
        models.create("tiny")
    with pytest.raises(ValueError, match=r"no model 'llama2_8b'\. Use one of tiny, llama2_7b"):
        models.config_of("llama2_8b")
    assert models.config_of("Tiny") is models.config_of(models.PRESETS["tiny"])


MODEL = nnx.merge(*models.abstract(models.config_of("tiny")))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: models.hf.save(MODEL, "folder"), r"hf\.save\(folder, model\) takes"),
        (lambda: quantization.save(MODEL, "folder"), r"quantization\.save\(folder, model\) takes"),
        (lambda: quantization.balance("folder", []), "quantization takes"),
        (lambda: generation.generate("folder", [[1]], max_tokens=1), "generation takes"),
        (lambda: evaluation.perplexity("folder", [[1, 2]], [2]), "perplexity takes"),
    ],
)
def test_another_argument_than_a_model_is_refused(call, said):
    with pytest.raises(TypeError, match=rf"{said} a model with .*, not str\."):
        call()


def shapes_of(config, tokens, *rest):
    graph, state = models.abstract(config)
    return jax.eval_shape(lambda s, *a: nnx.merge(graph, s)(*a), state, tokens, *rest)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


UNREADABLE = [
    ((ints(8),), ValueError, r"not of shape \(8,\). Add a batch axis"),
    ((ints(2, 65),), ValueError, "65 tokens is longer than context=64"),
    ((np.zeros((2, 8), np.float32),), TypeError, "tokens are .* whole numbers, not float32"),
    (([[1, 2]],), TypeError, r"tokens are an array of .*: pass jnp.asarray\(tokens, jnp.int32\)"),
    ((ints(2, 8), ints(2)), ValueError, r"positions of shape \(2,\) .* \(2, 8\) or \(8,\)"),
    ((ints(1, 2), [0, 1]), TypeError, r"positions are an array .*: pass jnp.asarray\(posi"),
    ((ints(2, 8), None, ints(8)), ValueError, r"segments of shape \(8,\)"),
]


@pytest.mark.parametrize(("args", "error", "message"), UNREADABLE)
def test_a_model_refuses_what_it_cannot_read(args, error, message):
    with pytest.raises(error, match=message):
        nnx.merge(*models.abstract(SMALL))(*args)


@pytest.mark.parametrize(
    ("changes", "names", "message"),
    [
        (AXES, ("data", "shard", "tensor"), "axis: fsdp .* is not found in mesh"),
        (AXES | {"ffn": 127}, None, r"mlp.down of shape \(2, 127, 64\) cannot be sharded as P"),
        (AXES, "none", "names axes of a mesh, and there is none"),
        (AXES, "explicit", r"must be automatic\. Make it with"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(changes, names, message):
    if names == "explicit":
        mesh = jax.make_mesh((8,), ("fsdp",))
    elif names == "none":
        mesh = None
    else:
        mesh = automatic_mesh(2, 2, 2, names=names or ("data", "fsdp", "tensor"))
    with pytest.raises(ValueError, match=message):
        models.create(variant(**changes), mesh=mesh)


def test_batch_axes_must_be_there_and_divide_the_batch():
    config = variant(batch_axes=("data", "fsdp"))
    uneven = pytest.raises(ValueError, match=r"axis 0 is partitioned 4 times.* size is 6")
    with jax.set_mesh(automatic_mesh(2, 2, 2)), uneven:
        shapes_of(config, ints(6, 8))
    missing = pytest.raises(ValueError, match=r"axis: fsdp .* is not found in mesh")
    with jax.set_mesh(automatic_mesh(8, names=("data",))), missing:
        shapes_of(config, ints(8, 8))
    assert shapes_of(config, ints(6, 8)).shape == (6, 8, 256)  # no mesh, nothing to shard


def test_every_layer_has_the_epsilon_and_the_activation_of_the_config():
    changes = {"norm_eps": 3e-4, "activation": "relu2", "activation_limit": 7}
    for scan, layers in ((True, 1), (False, SMALL.layers)):
        model = nnx.merge(*models.abstract(variant(scan=scan, **changes)))
        nodes = [node for _, node in nnx.iter_graph(model)]
        norms = [node for node in nodes if isinstance(node, nn.RMSNorm)]
        # Of each layer: before attention and MLP, of queries and of keys; and the last one.
        assert len(norms) == 4 * layers + 1
        assert {node.epsilon for node in norms} == {3e-4}
        mlps = [node for node in nodes if isinstance(node, nn.GatedMLP)]
        assert [(mlp.activation, mlp.limit) for mlp in mlps] == [("relu2", 7)] * layers
