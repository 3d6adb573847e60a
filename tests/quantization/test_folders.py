"""Folders of quantized models: there and back, their layout, and what is refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quantization_cases import quantized
from small_model import SMALL, assert_same_model, change, filled

from coat_jax import generation, nn
from coat_jax import quantization as q
from coat_jax.errors import UserError
from coat_jax.manifest import DamagedCheckpoint
from coat_jax.models import hf
from coat_jax.models.hf.files import CODES, FLOATS, read_tensors
from coat_jax.ops.quantized import ACTIVATION_MODES
from coat_jax.quantization import layout

CONFIG = dataclasses.replace(
    SMALL, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, qkv_bias=True, ffn=130
)


@functools.cache
def small(config=CONFIG, **recipe):
    return quantized(filled(config), **recipe)


@functools.cache
def mixed():
    """A model in which both formats occur: weights of some projections have outliers."""
    model = filled(dataclasses.replace(CONFIG, scan=False))
    for name in ("gate", "up"):
        weight = getattr(model.layers[1].mlp, name)
        weight[...] = weight[...].at[5].set(8.0)
    found = quantized(model, format="mixed", activations="none", leave=("*.out",))
    assert {scheme.format for scheme in q.schemes_of(found).values()} == {"int8", "fp8"}
    return found


@pytest.mark.costly
@pytest.mark.parametrize("activations", ACTIVATION_MODES)
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_models_come_back_bit_for_bit(format, activations, tmp_path):
    model = small(format=format, activations=activations, leave=("layers.0.*.value", "*.down"))
    q.save(tmp_path, model, file_bytes=20_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    again = q.load(tmp_path)
    assert again.config == model.config == q.read_config(tmp_path)
    assert q.schemes_of(again) == q.schemes_of(model)
    assert_same_model(again, model)


def test_the_files_have_the_layout_of_compressed_tensors(tmp_path):
    """Outputs first; the product of codes and scales is the weight, but for its rounding."""
    model = filled(CONFIG)
    q.save(tmp_path, quantized(model, format="fp8", activations="static"))
    tensors, module = read_tensors(tmp_path, FLOATS | CODES), "model.layers.1.self_attn.k_proj"
    codes, scale = (tensors[f"{module}.{name}"].whole() for name in ("weight", "weight_scale"))
    assert codes.dtype == ml_dtypes.float8_e4m3fn
    assert scale.shape == (codes.shape[0], 1)
    assert tensors[f"{module}.input_scale"].whole().shape == (1,)
    exact = np.asarray(model.layers.attention.key[...][1], np.float32).T
    values = codes.astype(np.float32) * scale
    assert np.linalg.norm(values - exact) < 2**-5 * np.linalg.norm(exact)
    assert tensors["lm_head.weight"].dtype == jnp.bfloat16
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
    assert_same_model(q.load(tmp_path), mixed())
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
    """Each device has its part of the codes; the text is the same, and what its logits say."""
    config = dataclasses.replace(CONFIG, dtype=jnp.float32, ffn=128, layers=1)
    q.save(tmp_path, small(config, activations="static"))
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    config = dataclasses.replace(q.read_config(tmp_path), axes=nn.MeshAxes(tensor="tensor"))
    prompt, greedy = [1, 2, 3], generation.Sampling(temperature=0)
    alone = q.load(tmp_path)
    (new,) = generation.generate(alone, [prompt], max_tokens=5, sampling=greedy)
    with jax.set_mesh(mesh):
        shared = q.load(tmp_path, config)
        for codes in (shared.layers[0].mlp.gate.codes, shared.layers[0].mlp.down.codes):
            assert codes[...].addressable_shards[0].data.size == codes[...].size // 2
        assert generation.generate(shared, [prompt], max_tokens=5, sampling=greedy) == [new]
    logits = np.asarray(alone(jnp.asarray([prompt + new])))[0, len(prompt) - 1 : -1]
    chosen = np.take_along_axis(logits, np.array(new)[:, None], axis=1)[:, 0]
    assert (chosen > logits.max(axis=1) - 1e-3 * np.abs(logits).max()).all()


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
        (lambda f: requantize(f, quant_method="bitnet"), "quantization by 'bitnet'"),
        (lambda f: requantize(f, config_groups=[]), "no config_groups"),
        (lambda f: requantize(f, kv_cache_scheme={"num_bits": 8}), "a kv_cache_scheme"),
        (lambda f: change_group(f, targets=None), "has targets=None"),
        (lambda f: change_group(f, weights=FOUR_BITS), "that coat_jax does not support"),
        (lambda f: change_group(f, weights=None), "that coat_jax does not support"),
        (lambda f: change_group(f, input_activations=FOUR_BITS), "that coat_jax does not support"),
        (lambda f: change_group(f, output_activations=FOUR_BITS), "does not support.*outputs"),
        (lambda f: requantize(f, ignore=[]), None),  # ours alone are linear: the head is a float
        (lambda f: requantize(f, ignore=["re:.*layers.1"]), "it also has .*weight_scale"),
    ],
)
def test_a_config_json_of_another_quantization_is_refused(damage, named, tmp_path):
    q.save(tmp_path, small())
    damage(tmp_path)
    if named is None:
        q.load(tmp_path)
        return
    with pytest.raises(UserError, match=named):
        q.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("load", [hf.load, q.load])
def test_a_flipped_bit_is_found_until_the_manifest_is_deleted(name, load, tmp_path):
    q.save(tmp_path, small()) if load is q.load else hf.save(tmp_path, filled(CONFIG))
    before, after = (b"10000.0", b"90000.0") if name == "config.json" else (b"\0", b"\1")
    content = (tmp_path / name).read_bytes()
    place = content.rindex(before)
    (tmp_path / name).write_bytes(content[:place] + after + content[place + len(before) :])
    (tmp_path / "README.md").write_text("another file")
    with pytest.raises(DamagedCheckpoint, match=f"checksum of {name} is wrong.* delete manifest"):
        load(tmp_path)
    (tmp_path / "manifest.json").write_text('["of another program"]')
    load(tmp_path)


def test_only_quantized_models_are_read_and_written_here(tmp_path):
    for content in ({"architectures": ["LlamaForCausalLM"]}, {"model": {}}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=f"{tmp_path.name} holds no quantized model.*convert"):
            q.load(tmp_path)
    with pytest.raises(ValueError, match=r"hf\.save writes others"):
        q.save(tmp_path / "other", filled(CONFIG))
    q.save(tmp_path / "small", small())
    with pytest.raises(UserError, match="quantization_config"):
        hf.load(tmp_path / "small")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"intermediate_size": 64}, r"weight int8 \(.*\) instead of int8 \("),
        # Before a model is built.
        ({"num_hidden_layers": 10_000}, r"lacks model\.layers\.10\."),
    ],
)
def test_tensors_that_are_not_what_config_json_says(changes, named, tmp_path):
    q.save(tmp_path, small())
    change(tmp_path, **changes)
    with pytest.raises(UserError, match=named):
        q.load(tmp_path)
