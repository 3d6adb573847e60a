"""SmolVLM, Idefics3 and LLaVA against transformers: logits, gradients, and files both can read.

The models are random and tiny, but all that a family does differently is in them.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_model import QUICK, assert_same_model

from coat_jax.models.vision_language import Batch, hf
from coat_jax.models.vision_language.hf.config import from_json
from coat_jax.models.vision_language.tower import rounded_places

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")
pytestmark = pytest.mark.oracle

IMAGE = 98
TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


class Case(NamedTuple):
    """A model of transformers: the names of its parts, and what differs from the sizes above."""

    model: str
    vision: str
    text: str
    scan: bool = True  # of ours
    settings: Mapping[str, Any] = MappingProxyType({})
    of_vision: Mapping[str, Any] = MappingProxyType({})


SMOLVLM, IDEFICS3 = ((name, f"{name}Vision", "Llama") for name in ("SmolVLM", "Idefics3"))
CLIP, SIGLIP = ("Llava", "CLIPVision", "Llama"), ("Llava", "SiglipVision", "Qwen2")
TIED = {"tie_word_embeddings": True}
FULL, DEFAULT = ({"vision_feature_select_strategy": name} for name in ("full", "default"))


def features_of(layer):
    return {"vision_feature_layer": layer}


CASES = {
    "SmolVLM": Case(*SMOLVLM, settings={"scale_factor": 2}),
    "SmolVLM tied": Case(*SMOLVLM, False, TIED | {"scale_factor": 4}, {"hidden_act": "gelu"}),
    "SmolVLM on a grid of 29": Case(*SMOLVLM, True, {"scale_factor": 29}, {"image_size": 29 * 4}),
    "Idefics3 on a grid of 25": Case(*IDEFICS3, False, {"scale_factor": 5}, {"image_size": 100}),
    "CLIP": Case(*CLIP, settings=DEFAULT),
    "CLIP with all it sees": Case(*CLIP, False, TIED | FULL | features_of(-1)),
    "CLIP after two layers": Case(
        *CLIP,
        False,
        {"multimodal_projector_bias": False} | features_of(2),
        {"layer_norm_eps": 1e-3},
    ),
    "SigLIP": Case(*SIGLIP, False, FULL),
    "SigLIP without a head": Case(
        *SIGLIP, True, TIED | FULL | features_of(-1), {"vision_use_head": False}
    ),
    "SigLIP after a layer": Case(*SIGLIP, True, FULL | features_of(1), {"hidden_act": "relu"}),
}


def their_model(case, dtype=torch.float32):
    """A random model that is no special case: scales are not 1, biases are not 0."""
    torch.manual_seed(0)
    tied = {"tie_word_embeddings": "tie_word_embeddings" in case.settings}
    vision = getattr(transformers, f"{case.vision}Config")(**VISION | case.of_vision)
    text = getattr(transformers, f"{case.text}Config")(**TEXT, **tied)
    config = getattr(transformers, f"{case.model}Config")(
        vision_config=vision, text_config=text, image_token_id=IMAGE, **case.settings
    )
    model = getattr(transformers, f"{case.model}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval().to(dtype)


class Pair(NamedTuple):
    """One model, theirs and ours, which read it from their files."""

    theirs: Any
    ours: Any


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    case = CASES[request.param]
    theirs, folder = their_model(case), tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder, max_shard_size="40KB")
    return Pair(theirs, hf.load(folder, replace(hf.read_config(folder), scan=case.scan)))


def batch_for(config):
    """Two images in the first row and one in the second, whose second image is not asked for."""
    rng, n, size = np.random.default_rng(0), config.features, config.tower.images.size
    tokens = rng.integers(0, IMAGE, (2, 9 + 2 * n))
    tokens[0, 2 : 2 + n] = tokens[0, 5 + n : 5 + 2 * n] = tokens[1, 4 : 4 + n] = IMAGE
    images = rng.integers(0, 256, (2, 2, size, size, 3)).astype(np.uint8)
    labels = np.where(tokens[:, 1:] == IMAGE, -100, tokens[:, 1:])
    return Batch(*map(jnp.asarray, (tokens[:, :-1], labels, images)))


def their_logits(model, config):
    batch, images = batch_for(config), config.tower.images
    mean, std = np.float32(images.mean), np.float32(images.std)
    pixels = (np.asarray(batch.images, np.float32) / 255 - mean) / std
    pixels = torch.tensor(pixels).permute(0, 1, 4, 2, 3)
    if model.config.model_type == "llava":
        pixels = torch.cat([pixels[0], pixels[1, :1]])
    else:
        pixels[1, 1] = 0  # the processor's padding
    return model(input_ids=torch.tensor(np.asarray(batch.tokens)), pixel_values=pixels).logits


def their_gradients(model, config):
    logits = their_logits(model, config)
    labels = torch.tensor(np.asarray(batch_for(config).labels, np.int64))
    model.zero_grad()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return {
        name: torch.zeros_like(p).numpy() if p.grad is None else p.grad.numpy()
        for name, p in model.named_parameters()
    }


def ours(model, batch):
    """The logits, and the gradients of the loss as a model."""
    graph, params, unused = nnx.split(model, nnx.Param, ...)

    def both(params, unused, batch):
        def loss(params):
            model = nnx.merge(graph, params, unused)
            return model.loss(batch).mean, model(batch)

        return jax.grad(loss, has_aux=True)(params)

    gradients, logits = jax.jit(both, compiler_options=QUICK)(params, unused, batch)
    zeros = jax.tree.map(jnp.zeros_like, unused)
    return np.asarray(logits), nnx.merge(graph, gradients, zeros)


def test_the_logits_and_gradients_are_theirs(pair, tmp_path):
    config = pair.ours.config
    logits, gradients = ours(pair.ours, batch_for(config))
    with torch.no_grad():
        theirs = their_logits(pair.theirs, config).numpy()
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(logits, theirs, atol=2e-5)
    # Written like a model, gradients have transformers' names and layouts.
    hf.save(tmp_path, gradients)
    found = type(pair.theirs).from_pretrained(tmp_path).state_dict()
    for name, gradient in their_gradients(pair.theirs, config).items():
        # Sums of some 100 products, a dozen deep, in FP32. A bias of keys in the tower has none.
        limit = 1e-4 * np.abs(gradient).max() + 1e-7
        np.testing.assert_allclose(found[name], gradient, atol=limit, err_msg=name)


def test_places_on_all_grids_are_theirs():
    """Of a table of 0, 1, .. under patches of 0 the embeddings are the places."""
    kind = transformers.models.smolvlm.modeling_smolvlm.SmolVLMVisionEmbeddings
    for side in range(1, 80):
        sizes = {"hidden_size": 1, "image_size": side, "patch_size": 1}
        embeddings = kind(transformers.SmolVLMVisionConfig(**sizes)).requires_grad_(False)
        embeddings.position_embedding.weight[:, 0] = torch.arange(side**2)
        everywhere = torch.ones(1, side, side, dtype=torch.bool)
        embeddings.patch_embedding.bias.zero_()
        theirs = embeddings(torch.zeros(1, 3, side, side), everywhere)
        np.testing.assert_array_equal(rounded_places(side), theirs.numpy().ravel())


def read_by_transformers(kind, folder):
    """The model in a folder, which has all its tensors and no others."""
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model


def assert_same_tensors(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


def test_files_come_back_bit_for_bit_and_transformers_reads_them(pair, tmp_path):
    """With tensors that are not used. Idefics3 comes back as the SmolVLM that it equals."""
    hf.save(tmp_path, pair.ours, file_bytes=40_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    kind = transformers.AutoModelForImageTextToText
    assert_same_tensors(read_by_transformers(kind, tmp_path), pair.theirs)
    again = replace(hf.read_config(tmp_path), scan=pair.ours.config.scan)
    assert again == pair.ours.config


@pytest.mark.parametrize("name", ["SmolVLM tied", "CLIP", "SigLIP"])
def test_bf16_weights_stay_bf16_bit_for_bit(name, tmp_path):
    theirs = their_model(CASES[name], torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    model = hf.load(tmp_path / "theirs")
    assert model.config.dtype == model.tower.patch[...].dtype == jnp.bfloat16
    hf.save(tmp_path / "ours", model)
    assert_same_tensors(read_by_transformers(type(theirs), tmp_path / "ours"), theirs)


OLD = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("name", ["CLIP", "SigLIP without a head"])
def test_all_layouts_of_llava_are_read(name, old, inside, tmp_path):
    """With the old prefixes or the new ones, and the tower under `vision_model` or not."""
    theirs = their_model(CASES[name])
    theirs.save_pretrained(tmp_path)
    wanted, tensors = hf.load(tmp_path), {}
    for new, tensor in theirs.state_dict().items():
        plain = new.replace("vision_tower.vision_model.", "vision_tower.")
        moved = plain.replace("vision_tower.", "vision_tower.vision_model.") if inside else plain
        prefix = next(prefix for prefix in OLD if moved.startswith(prefix))
        tensors[OLD[prefix] + moved.removeprefix(prefix) if old else moved] = tensor.numpy()
    if wanted.config.tied:
        tensors = {name: t for name, t in tensors.items() if "lm_head" not in name}
    safetensors.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_same_tensors(read_by_transformers(type(theirs), tmp_path), theirs)
    assert_same_model(hf.load(tmp_path), wanted)


@pytest.mark.parametrize("text", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("case", [CASES["SmolVLM"], CASES["CLIP"], CASES["SigLIP"]])
def test_what_config_json_leaves_out_is_as_in_transformers(case, text):
    """Where it only says of what kinds the parts are, as where transformers writes all of it."""
    vision = getattr(transformers, f"{case.vision}Config").model_type
    parts = {"text_config": {"model_type": text}, "vision_config": {"model_type": vision}}
    given = {**parts, "image_token_id": 7}
    given |= {"SmolVLMVision": {"scale_factor": 7}, "SiglipVision": FULL}.get(case.vision, {})
    theirs = getattr(transformers, f"{case.model}Config")(**given).to_dict()
    names = {"architectures": [f"{case.model}ForConditionalGeneration"]}
    assert from_json(given | names) == from_json(theirs | names)
