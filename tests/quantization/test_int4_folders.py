"""Folders in INT4: there and back, on a mesh, and what others write."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantization_cases import quantized
from safetensors.numpy import load_file, save_file
from small_model import SMALL, assert_same_model, change, filled

from coat_jax import nn
from coat_jax import quantization as q
from coat_jax.errors import UserError
from coat_jax.models import hf
from coat_jax.numerics import four_bits
from coat_jax.ops.quantized import ACTIVATION_MODES
from coat_jax.quantization import layout

CONFIG = dataclasses.replace(
    SMALL, dtype=jnp.float32, width=128, heads=8, ffn=256, layers=1, scan=False
)


@functools.cache
def small(**recipe):
    return quantized(filled(CONFIG), format="int4", **recipe)


@pytest.mark.parametrize("activations", ACTIVATION_MODES)
def test_models_come_back_bit_for_bit(activations, tmp_path):
    model = small(activations=activations, leave=("*.value",))
    q.save(tmp_path, model)
    again = q.load(tmp_path)
    assert q.schemes_of(again) == q.schemes_of(model)
    assert_same_model(again, model)


def test_a_parameter_takes_half_a_byte_and_scales_little_more():
    layer = small().layers[0].mlp.down
    assert layer.nbytes / (128 * 256) == 0.5 + 2 / 128


def test_scales_of_any_size_are_read_with_the_zero_eight(tmp_path):
    q.save(tmp_path, small(activations="none"))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = layout.module_of("layers.0.mlp.down")
    scale = tensors[f"{name}.weight_scale"].copy()
    scale[:, 0] = 1.3 * scale[:, 0].astype(np.float32)
    tensors[f"{name}.weight_scale"] = scale
    save_file(tensors, file, {"format": "pt"})
    (tmp_path / "manifest.json").unlink()
    again = q.load(tmp_path)
    assert q.schemes_of(again)["layers.0.mlp.down"].zeros
    assert not q.schemes_of(again)["layers.0.mlp.gate"].zeros
    weight = again.layers[0].mlp.down.weight()
    assert (weight.zero == four_bits.ZERO).all()
    assert (weight.codes == small(activations="none").layers[0].mlp.down.codes[...]).all()
    with pytest.raises(UserError, match="INT4 weights have zeros"):
        q.save(tmp_path / "again", again)


def test_a_model_is_loaded_onto_a_mesh(tmp_path):
    config = dataclasses.replace(CONFIG, head_dim=32)
    q.save(tmp_path, quantized(filled(config), format="int4"))
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    tokens = jnp.arange(8)[None]
    alone = q.load(tmp_path)(tokens)
    config = dataclasses.replace(q.read_config(tmp_path), axes=nn.MeshAxes(tensor="tensor"))
    with jax.set_mesh(mesh):
        shared = q.load(tmp_path, config)
        down = shared.layers[0].mlp.down
        assert down.codes[...].sharding.spec[1] == down.scale[...].sharding.spec[1] == "tensor"
        np.testing.assert_allclose(shared(tokens), alone, atol=1e-4 * float(jnp.abs(alone).max()))
        q.save(tmp_path / "small", small())
        with pytest.raises(
            UserError, match="128 inputs in INT4 are 1 group of 128, which 2 devices"
        ):
            q.load(tmp_path / "small", dataclasses.replace(config, head_dim=16))


def test_inputs_that_fill_no_groups_are_refused_before_the_work():
    with pytest.raises(UserError, match=r"other numbers of them: '\*\.gate' \(64\), '\*\.key'"):
        quantized(filled(SMALL), format="int4")


# --- AWQ and GPTQ ----------------------------------------------------------------------------


def nibbles(codes, order=range(8)):
    """The last axis, eight codes to a number."""
    eight = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    return sum(eight[..., of] << (4 * place) for place, of in enumerate(order)).astype(np.int32)


def theirs(folder, method, **more):
    """A folder of a method, and the weights that it stands for, [N, K]."""
    hf.save(folder, filled(CONFIG))
    file, random, weights = folder / "model.safetensors", np.random.default_rng(0), {}
    tensors = load_file(file)
    for path in (p for p in q.projections.paths_of(CONFIG) if not p.endswith("down")):
        name = layout.module_of(path)
        outputs, inputs = tensors.pop(f"{name}.weight").shape
        codes = random.integers(0, 16, (outputs, inputs))
        zeros = random.integers(0, 16, (outputs, inputs // 128))
        scales = random.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
        weights[path] = (codes - zeros.repeat(128, 1)) * scales.astype(np.float32).repeat(128, 1)
        if method == "awq":
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            parts = {"qweight": nibbles(codes.T, order), "qzeros": nibbles(zeros.T, order)}
        else:
            parts = {"qweight": nibbles(codes).T, "qzeros": nibbles(zeros.T) - np.int32(0x11111111)}
            parts["g_idx"] = np.arange(inputs, dtype=np.int32) // 128
        parts["scales"] = scales.T
        tensors |= {f"{name}.{part}": np.ascontiguousarray(a) for part, a in parts.items()}
    save_file(tensors, file, {"format": "pt"})
    said = {"awq": {"version": "gemm", "zero_point": True}, "gptq": {"desc_act": False}}[method]
    said = {"quant_method": method, "bits": 4, "group_size": 128, **said, **more}
    change(folder, quantization_config=said)
    return weights


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_others_weights_are_read_as_they_are(method, tmp_path):
    weights = theirs(tmp_path, method)
    model = q.load(tmp_path)
    assert q.schemes_of(model).keys() == weights.keys()
    for path, expected in weights.items():
        _, layer, part, name = path.split(".")
        weight = getattr(getattr(model.layers[int(layer)], part), name).weight()
        assert (
            np.asarray(four_bits.values(weight.codes, weight.scale, weight.zero)) == expected
        ).all()
    assert jnp.isfinite(model(jnp.arange(8)[None])).all()


@pytest.mark.parametrize(
    ("method", "more", "named"),
    [
        ("awq", {"version": "gemv"}, "has version='gemv'; coat_jax reads 'gemm'"),
        ("gptq", {"bits": 3}, "has bits=3; coat_jax reads 4"),
        ("awq", {"group_size": 64}, "has group_size=64"),
        ("gptq", {"checkpoint_format": "marlin"}, "has checkpoint_format='marlin'"),
    ],
)
def test_other_settings_are_refused(method, more, named, tmp_path):
    theirs(tmp_path, method, **more)
    with pytest.raises(UserError, match=named):
        q.load(tmp_path)


@pytest.mark.parametrize(
    ("change_one", "named"),
    [
        ({"up_proj.qweight": lambda a: a[:, :-1]}, r"up_proj\.qweight is int32 \(16, 255\)"),
        ({"up_proj.qweight": lambda a: a.astype(np.float32)}, "qweight is float32"),
        ({"up_proj.qzeros": lambda a: None}, r"qzeros is none, and INT4 needs int32 \(1, 32\)"),
        ({"up_proj.scales": lambda a: a[0]}, "needs float16"),
        ({"up_proj.g_idx": lambda a: a[:5]}, "groups of inputs that are no neighbours"),
        ({"up_proj.bias": lambda a: np.ones(256, np.float16)}, r"also has .*up_proj\.bias"),
        ({"up_proj.bias": lambda a: np.zeros(256, np.float16)}, None),
    ],
)
def test_tensors_that_do_not_fit_are_named(change_one, named, tmp_path):
    theirs(tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    ((name, how),) = change_one.items()
    changed = how(tensors.pop(f"model.layers.0.mlp.{name}", None))
    if changed is not None:
        tensors[f"model.layers.0.mlp.{name}"] = np.ascontiguousarray(changed)
    save_file(tensors, file, {"format": "pt"})
    if named is None:
        q.load(tmp_path)
        return
    with pytest.raises(UserError, match=named):
        q.load(tmp_path)


def test_groups_in_the_order_of_activations_are_refused(tmp_path):
    theirs(tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = layout.module_of("layers.0.mlp.up") + ".g_idx"
    tensors[name] = tensors[name][::-1].copy()
    tensors[name][0] = 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"mlp\.up_proj has groups of inputs that are no neigh"):
        q.load(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]
