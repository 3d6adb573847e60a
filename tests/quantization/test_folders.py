"""Folders of quantized models: there and back, their layout, and what is refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from small_model import SMALL, change, filled

from coat_jax import generation, nn
from coat_jax import quantization as q
from coat_jax.errors import UserError
from coat_jax.manifest import DamagedCheckpoint
from coat_jax.models import hf
from coat_jax.models.hf.files import CODES, FLOATS, Tensors
from coat_jax.ops.quantized import ACTIVATION_MODES
from coat_jax.quantization import layout
from coat_jax.quantization.folders import _packed, _unpacked

TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab, (1, 2, 16))
CONFIG = dataclasses.replace(
    SMALL, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, qkv_bias=True, ffn=130
)


@functools.cache
def quantized(config=CONFIG, **recipe):
    model, recipe = filled(config), q.Recipe(**recipe)
    ranges = q.calibrate(model, TOKENS, recipe) if recipe.calibrated else None
    return q.quantize(model, recipe, ranges)


def assert_same(one, other):
    one, other = (dict(nnx.to_flat_state(nnx.state(m))) for m in (one, other))
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        assert leaf[...].dtype == other[path][...].dtype, path
        same = np.asarray(leaf[...]).tobytes() == np.asarray(other[path][...]).tobytes()
        assert same, path


@functools.cache
def mixed():
    """A model in which both formats occur: weights of some projections have outliers."""
    model = filled(dataclasses.replace(CONFIG, scan=False))
    for name in ("gate", "up"):
        weight = getattr(model.layers[1].mlp, name)
        weight[...] = weight[...].at[5].set(8.0)
    small = q.quantize(model, q.Recipe(format="mixed", activations="none", leave=("*.out",)))
    assert {scheme.format for scheme in q.schemes_of(small).values()} == {"int8", "fp8"}
    return small


@pytest.mark.costly
@pytest.mark.parametrize("activations", ACTIVATION_MODES)
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_models_come_back_bit_for_bit(format, activations, tmp_path):
    small = quantized(format=format, activations=activations, leave=("layers.0.*.value", "*.down"))
    q.save(tmp_path, small, file_bytes=20_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    again = q.load(tmp_path)
    assert again.config == small.config == q.read_config(tmp_path)
    assert q.schemes_of(again) == q.schemes_of(small)
    assert_same(again, small)


@pytest.mark.parametrize("columns", [1, 3, 4, 130])
def test_packed_codes_come_back(columns):
    codes = np.random.default_rng(0).integers(-128, 128, (5, columns)).astype(np.int8)
    packed = _packed(codes)
    assert packed.dtype == np.int32
    assert packed.shape == (5, -(-columns // 4))
    assert packed[0, 0] & 0xFF == int(codes[0, 0]) + 128
    np.testing.assert_array_equal(_unpacked(packed, columns), codes)


def test_the_files_have_the_layout_of_compressed_tensors(tmp_path):
    """Outputs first; the product of codes and scales is the weight, but for its rounding."""
    model = filled(CONFIG)
    recipe = q.Recipe(format="fp8", activations="static")
    q.save(tmp_path, q.quantize(model, recipe, q.calibrate(model, TOKENS, recipe)))
    tensors, module = Tensors(tmp_path, FLOATS | CODES), "model.layers.1.self_attn.k_proj"
    every = (slice(None), slice(None))
    codes, scale = (tensors.read(f"{module}.{name}", every) for name in ("weight", "weight_scale"))
    assert codes.dtype == ml_dtypes.float8_e4m3fn
    assert scale.shape == (codes.shape[0], 1)
    assert tensors.shape(f"{module}.input_scale") == (1,)
    exact = np.asarray(model.layers.attention.key[...][1], np.float32).T
    values = codes.astype(np.float32) * scale
    assert np.linalg.norm(values - exact) < 2**-5 * np.linalg.norm(exact)
    assert tensors.dtype("lm_head.weight") == "bfloat16"
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert said["format"] == "float-quantized"
    assert said["ignore"] == ["lm_head"]
    (group,) = said["config_groups"].values()
    assert group["targets"] == ["Linear"]


def test_formats_of_the_files(tmp_path):
    """What vLLM reads: weights alone in INT8 only where they are packed.

    A mixed model, too, comes back bit for bit.
    """
    kinds = ("int8", "none"), ("int8", "dynamic"), ("fp8", "none")
    formats = [layout.storage_of(q.Scheme(*kind)) for kind in kinds]
    assert formats == ["pack-quantized", "int-quantized", "float-quantized"]
    q.save(tmp_path, mixed())
    assert_same(q.load(tmp_path), mixed())
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert said["format"] == "mixed-precision"
    groups = said["config_groups"].values()
    assert sorted(group["format"] for group in groups) == ["float-quantized", "pack-quantized"]
    targets = [set(group["targets"]) for group in groups]
    assert not targets[0] & targets[1]
    assert "model.layers.0.self_attn.o_proj" in said["ignore"]
    for group in targets:  # what vLLM multiplies at once is in one format
        for first, second in (("q_proj", "v_proj"), ("gate_proj", "up_proj")):
            assert {t.replace(first, second) for t in group if first in t} <= group


def test_a_model_is_loaded_onto_a_mesh(tmp_path):
    """Each device has its part of the codes, and the text is the same."""
    config = dataclasses.replace(CONFIG, dtype=jnp.float32, ffn=128, layers=1)
    small = quantized(config, activations="static")
    q.save(tmp_path, small)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    config = dataclasses.replace(q.read_config(tmp_path), axes=nn.MeshAxes(tensor="tensor"))
    settings = {"max_tokens": 5, "sampling": generation.Sampling(temperature=0)}
    with jax.set_mesh(mesh):
        shared = q.load(tmp_path, config)
        for codes in (shared.layers[0].mlp.gate.codes, shared.layers[0].mlp.down.codes):
            assert codes[...].addressable_shards[0].data.size == codes[...].size // 2
        tokens = generation.generate(shared, [[1, 2, 3]], **settings)
    assert tokens == generation.generate(q.load(tmp_path), [[1, 2, 3]], **settings)


# --- Refusals --------------------------------------------------------------------------------


def requantize(folder, **entries):
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    change(folder, quantization_config=said | entries)


def change_group(folder, **entries):
    said = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    said["group_0"] |= entries
    requantize(folder, config_groups=said)


FOUR_BITS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: requantize(f, quant_method="gptq"), "quantization by 'gptq'"),
        (lambda f: requantize(f, config_groups=[]), "no config_groups"),
        (lambda f: requantize(f, kv_cache_scheme={"num_bits": 8}), "a kv_cache_scheme"),
        (lambda f: requantize(f, ignore=["re:("]), "the pattern 're:\\('"),
        (lambda f: change_group(f, targets=None), "has targets=None"),
        (lambda f: change_group(f, weights=FOUR_BITS), "that coat_jax does not support"),
        (lambda f: change_group(f, weights=None), "has weights=None"),
        (lambda f: change_group(f, input_activations=FOUR_BITS), "that coat_jax does not support"),
        (lambda f: change_group(f, output_activations=FOUR_BITS), "does not support.*outputs"),
        (lambda f: requantize(f, ignore=[]), None),  # ours alone are linear: the head is a float
        (lambda f: requantize(f, ignore=["re:.*layers.1"]), "lacks tensors|unexpected tensors"),
    ],
)
def test_a_config_json_of_another_quantization_is_refused(damage, named, tmp_path):
    q.save(tmp_path, quantized())
    damage(tmp_path)
    if named is None:
        q.load(tmp_path)
        return
    with pytest.raises(UserError, match=named):
        q.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "before", "after", "load"),
    [
        ("config.json", b"10000.0", b"90000.0", hf.load),
        ("config.json", b"10000.0", b"90000.0", q.load),
        ("model.safetensors", b"\0", b"\1", q.load),
    ],
)
def test_a_flipped_bit_is_found_until_the_manifest_is_deleted(name, before, after, load, tmp_path):
    q.save(tmp_path, quantized()) if load is q.load else hf.save(tmp_path, filled(CONFIG))
    content = (tmp_path / name).read_bytes()
    place = content.rindex(before)
    (tmp_path / name).write_bytes(content[:place] + after + content[place + len(before) :])
    (tmp_path / "README.md").write_text("another file")
    with pytest.raises(DamagedCheckpoint, match=f"checksum of {name} is wrong.* delete manifest"):
        load(tmp_path)
    (tmp_path / "manifest.json").write_text('["of another program"]')
    load(tmp_path)


@pytest.mark.parametrize("content", [{"architectures": ["LlamaForCausalLM"]}, {"model": {}}])
def test_a_model_that_is_not_quantized_is_refused(content, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"{tmp_path.name} holds no quantized model.*coat convert"):
        q.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"intermediate_size": 64}, r"is int8 of shape .* says int8 of shape"),
        # Before a model is built.
        ({"num_hidden_layers": 10_000}, r"tensors of 2 layers, and .* a model of 10,000\."),
    ],
)
def test_tensors_that_are_not_what_config_json_says(changes, named, tmp_path):
    q.save(tmp_path, quantized())
    change(tmp_path, **changes)
    with pytest.raises(UserError, match=named):
        q.load(tmp_path)


def test_only_quantized_models_are_saved_here_and_only_others_by_the_plain_module(tmp_path):
    with pytest.raises(ValueError, match=r"hf\.save writes others"):
        q.save(tmp_path / "other", filled(CONFIG))
    q.save(tmp_path, quantized())
    with pytest.raises(UserError, match="quantization_config"):
        hf.load(tmp_path)
