"""Hugging Face folders of models that see: there and back bit for bit, and refusals by name."""

import json
import re
from dataclasses import replace

import jax.numpy as jnp
import pytest
from small_model import assert_same_files, assert_same_model, files_of, rewrite
from vision_cases import (
    CLIP_TOWER,
    FAMILIES,
    QWEN2,
    SIGLIP_TOWER,
    SMOLVLM,
    SMOLVLM_TOWER,
    TOWER,
    changed,
    filled,
    llava,
)

from coat_jax import ops
from coat_jax.errors import UserError
from coat_jax.models.vision_language import PRESETS, ImageFormat, hf
from coat_jax.models.vision_language.hf.config import from_json, to_json

each_family = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
CLIP = FAMILIES["CLIP and Llama"]


# --- There and back --------------------------------------------------------------------------


@each_family
def test_a_config_passes_through_config_json(config):
    data = json.loads(json.dumps(to_json(config, jnp.float32)))
    assert from_json(data) == config
    assert data.get("image_seq_length", config.features) == config.features
    other = replace(config.tower.images, mean=(0.4, 0.5, 0.6), resample="bilinear")
    assert from_json(data, other.to_json()) == changed(config, tower={"images": other})


def test_a_preset_passes_through_config_json():
    config = replace(PRESETS["smolvlm_256m"], precision="bf16", dtype=jnp.float32)
    assert from_json(to_json(config, jnp.float32)) == config


@pytest.mark.parametrize("layer", [-3, -2, -1, 1, 2, 3])
def test_layers_after_the_features_are_unused(layer):
    """Of three layers: negative numbers count from the end, others from before the first."""
    data = to_json(CLIP, jnp.float32) | {"vision_feature_layer": layer}
    assert data["vision_config"]["num_hidden_layers"] == 3
    tower = from_json(data).tower
    assert tower.layers == (layer if layer > 0 else 4 + layer)
    assert tower.unused == ("layer",) * (3 - tower.layers) + ("last_norm",)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_comes_back_bit_for_bit(tmp_path, family):
    """In one file or in many; stacked layers in FP32, and for every other family lists in BF16."""
    scan = list(FAMILIES).index(family) % 2 == 0
    dtype = jnp.float32 if scan else jnp.bfloat16
    config = replace(FAMILIES[family], scan=scan, param_dtype=dtype, dtype=dtype)
    model = filled(config)
    for name, size in (("one", 10**9), ("many", 20_000)):
        folder = tmp_path / name
        hf.save(folder, model, file_bytes=size)
        assert replace(hf.read_config(folder), scan=scan) == config
        assert_same_model(hf.load(folder, config), model)
        assert (len(list(folder.glob("*.safetensors"))) > 3) == (name == "many")
    assert_same_files(tmp_path / "one", tmp_path / "many")
    other = hf.load(tmp_path / "many", replace(config, scan=not scan))
    hf.save(tmp_path / "other", other)
    assert_same_files(tmp_path / "one", tmp_path / "other")


def test_how_pictures_become_pixels_is_in_either_file_of_the_processor(tmp_path):
    images = replace(TOWER.images, resample="bilinear")
    config = changed(FAMILIES["SigLIP and Qwen2"], tower={"images": images})
    hf.save(tmp_path, filled(config))
    assert hf.read_config(tmp_path) == config
    (tmp_path / "preprocessor_config.json").unlink()
    assert hf.read_config(tmp_path).tower.images == TOWER.images  # the family's default
    processor = {"image_processor": images.to_json(), "processor_class": "LlavaProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    assert hf.read_config(tmp_path) == config


def test_places_that_need_no_rounding_make_a_smolvlm():
    config = changed(SMOLVLM, tower={"rounded_places": False})
    assert from_json(to_json(config, jnp.float32)) == SMOLVLM


# --- Refusals --------------------------------------------------------------------------------


def json_of(config, **changes):
    """A config.json with other entries; vision__x is entry x of vision_config."""
    data = to_json(config, jnp.float32)
    for name, value in changes.items():
        part, _, inside = name.partition("__")
        if inside:
            data[f"{part}_config"][inside] = value
        else:
            data[name] = value
    return data


SIGLIP = FAMILIES["SigLIP and Qwen2"]
REFUSED = [
    (CLIP, {"architectures": ["PaliGemmaForConditionalGeneration"]}, "architecture 'PaliGemma"),
    (CLIP, {"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM'. There are SmolVLMFor"),
    (CLIP, {"vision__model_type": "pixtral"}, "vision_config.model_type='pixtral', .* 'clip_visi"),
    (SMOLVLM, {"vision__model_type": "clip_vision_model"}, "model_type='clip_vision_model'"),
    (CLIP, {"vision__model_type": ["x"]}, r"vision_config.model_type=\['x'\]"),
    (CLIP, {"text__model_type": "gemma"}, "text_config.model_type='gemma'. There are llama, "),
    (CLIP, {"text__model_type": ["llama"]}, r"text_config.model_type=\['llama'\]. There are"),
    (CLIP, {"text_config": None}, "text_config=None must be a dict"),
    (CLIP, {"vision_config": []}, r"vision_config=\[\] must be a dict"),
    (CLIP, {"vision_feature_layer": [-2, -5]}, r"vision_feature_layer=\[-2, -5\]: .* 3 layers"),
    (CLIP, {"vision_feature_layer": 4}, "vision_feature_layer=4: .* one of the 3 layers"),
    (CLIP, {"vision_feature_layer": 0}, "vision_feature_layer=0: .* one of the 3 layers"),
    (CLIP, {"vision_feature_layer": -4}, "vision_feature_layer=-4: .* one of the 3 layers"),
    (CLIP, {"vision_feature_select_strategy": "cls"}, "select_strategy='cls', which"),
    (SIGLIP, {"vision_feature_select_strategy": "default"}, 'strategy="default".* Only "full"'),
    (CLIP, {"projector_hidden_act": "relu"}, "projector_hidden_act='relu', which"),
    (CLIP, {"multimodal_projector_bias": "yes"}, "projector_bias='yes' must be True or False"),
    (CLIP, {"image_token_index": 256}, "image_token=256 is outside the decoder's vocabulary"),
    (SMOLVLM, {"image_token_id": None}, "image_token_id=None must be a whole number"),
    (SMOLVLM, {"scale_factor": 3}, "shuffle=3 must divide the 4 patches"),
    (SMOLVLM, {"scale_factor": "2"}, "scale_factor='2' must be"),
    (SMOLVLM, {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be True or False"),
    (SMOLVLM, {"torch_dtype": "int8"}, "dtype='int8' must be 'float32'"),
    (SMOLVLM, {"text__rope_scaling": {"rope_type": "yarn"}}, "type='yarn', which coat_jax"),
    (SMOLVLM, {"vision__num_channels": 1}, "vision_config.num_channels=1, which"),
    (SMOLVLM, {"vision__attention_dropout": 0.1}, "vision_config.attention_dropout=0.1"),
    (SMOLVLM, {"vision__hidden_act": "mish"}, "vision_config.hidden_act='mish'. There are silu"),
    (SMOLVLM, {"vision__hidden_act": ["gelu"]}, r"hidden_act=\['gelu'\]. There are silu"),
    (SMOLVLM, {"vision__image_size": 18}, "images.size=18 must be a multiple of patch=4"),
    (SMOLVLM, {"vision__image_size": [16, 16]}, r"image_size=\[16, 16\] must be"),
    (SMOLVLM, {"vision__hidden_size": 33}, "width=33 must be a multiple of heads=2"),
    (SMOLVLM, {"vision__num_hidden_layers": 0}, "vision_config.num_hidden_layers=0 must be"),
]


@pytest.mark.parametrize(("config", "changes", "message"), REFUSED)
def test_what_a_config_cannot_say_is_refused(config, changes, message):
    with pytest.raises(UserError, match=message):
        from_json(json_of(config, **changes))


def test_a_preprocessor_of_another_size_is_refused():
    message = "makes images of 32 pixels, and the tower in config.json has image_size=16"
    with pytest.raises(UserError, match=message):
        from_json(to_json(CLIP, jnp.float32), ImageFormat(size=32).to_json())


NONE = "No architecture of transformers computes this tower with a projector of the kind"
GRID = ImageFormat(size=100)  # of 25 patches on a side, whose places Idefics3 rounds
NOT_SAVED = [
    (changed(SMOLVLM, tower={"last_norm": False}), f"{NONE} 'linear'"),
    (changed(SMOLVLM, tower={"class_token": True}), f"{NONE} 'linear'"),
    (changed(SMOLVLM, tower={"patch_bias": False}), f"{NONE} 'linear'"),
    (changed(SMOLVLM, tower={"unused": ("last_norm",)}), f"{NONE} 'linear'"),
    (
        changed(SMOLVLM, tower={"images": GRID, "rounded_places": False}, shuffle=5),
        f"{NONE} 'linear'",
    ),
    (llava(replace(SMOLVLM_TOWER, unused=("last_norm",))), f"{NONE} 'mlp'"),
    (llava(replace(CLIP_TOWER, first_norm=False)), f"{NONE} 'mlp'"),
    (llava(replace(CLIP_TOWER, images=GRID, rounded_places=True)), f"{NONE} 'mlp'"),
    (llava(replace(CLIP_TOWER, unused=("last_norm", "head"))), f"{NONE} 'mlp'"),
    (llava(replace(CLIP_TOWER, unused=("last_norm", "layer"))), f"{NONE} 'mlp'"),
    (llava(replace(SIGLIP_TOWER, unused=())), f"{NONE} 'mlp'"),
    (llava(CLIP_TOWER, replace(QWEN2, norm="layer")), "transformers computes .*'norm': 'layer'"),
]


@pytest.mark.parametrize(("config", "message"), NOT_SAVED)
def test_a_model_that_transformers_does_not_have_is_not_saved(config, message, tmp_path):
    with pytest.raises(UserError, match=message):
        hf.save(tmp_path, filled(config))
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("part", ["tower", "decoder"])
def test_an_activation_that_transformers_does_not_have_is_named(part, monkeypatch):
    monkeypatch.setitem(ops.ACTIVATIONS, "tanh", jnp.tanh)
    config = changed(CLIP, **{part: {"activation": "tanh"}})
    with pytest.raises(
        UserError, match=r"cannot compute (tower\.)?activation='tanh': .* silu, gelu"
    ):
        to_json(config, jnp.float32)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vision_tower.vision_model.encoder.layers.2.mlp.fc1.weight", (64, 32)),  # unused
        ("vision_tower.vision_model.embeddings.patch_embedding.weight", (32, 3, 4, 4)),
        ("multi_modal_projector.linear_1.bias", (64,)),
    ],
)
def test_tensors_that_do_not_fit_are_named(name, shape, tmp_path):
    hf.save(tmp_path, filled(CLIP))
    tensor = files_of(tmp_path)[name]
    assert tensor.shape == shape
    rewrite(tmp_path, **{name: tensor[1:]})
    with pytest.raises(UserError, match=re.escape(f"{name} {tensor[1:].shape} instead of {shape}")):
        hf.load(tmp_path)
    rewrite(tmp_path, **{name: None})
    with pytest.raises(UserError, match=f"lacks {name}"):
        hf.load(tmp_path)
    rewrite(tmp_path, **{name: tensor, "vision_tower.vision_model.head.probe": tensor})
    with pytest.raises(UserError, match=r"also has vision_tower.vision_model.head.probe"):
        hf.load(tmp_path)


def test_another_argument_than_a_model_that_sees_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"hf\.save\(folder, model\) takes a model with tower"):
        hf.save(tmp_path, filled(CLIP).decoder)


def test_a_folder_that_holds_a_model_is_refused_as_it_is(tmp_path):
    folder = tmp_path / "a"
    hf.save(folder, filled(SMOLVLM))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = changed(SMOLVLM, tower={"images": replace(SMOLVLM_TOWER.images, resample="bicubic")})
    with pytest.raises(UserError, match="holds a model already"):
        hf.save(folder, filled(other))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
