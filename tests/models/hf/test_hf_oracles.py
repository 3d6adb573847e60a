"""Every family against transformers: logits, gradients, and files that both can read.

The models are random and tiny, but all that a family does differently is in them: sizes of heads
that do not follow from the width, windows shorter than the text, scaled rotary positions, ties,
other activations.
"""

import copy
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_model import QUICK, SMALL, filled

from coat_jax.models import Batch, hf
from coat_jax.models.hf.config import from_json
from coat_jax.models.hf.files import read_tensors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.oracle

VOCABULARY, LENGTH = 89, 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
FAMILIES = {
    "Llama": {"rms_norm_eps": 1e-3, "rope_parameters": LLAMA3},
    "Mistral": {"head_dim": 16, "sliding_window": 9, "hidden_act": "gelu"},
    "Qwen2": {
        "tie_word_embeddings": True,
        "rope_parameters": LINEAR,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True, **WINDOW},
    "Olmo": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "hidden_act": "relu2",
    },
    "Olmo2": {"rms_norm_eps": 1e-2},
    "Mixtral": {
        "head_dim": 16,
        "sliding_window": 9,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "Qwen3Moe": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5},
}


def their_model(name, **changes):
    """A random model that is no special case: scales are not 1, biases are not 0."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **FAMILIES[name], **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


class Pair(NamedTuple):
    """One model, theirs and ours, which read it from their files."""

    theirs: Any
    ours: Any
    folder: Any


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    theirs = their_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").exists()
    config = dataclasses.replace(hf.read_config(folder), precision="bf16")
    return Pair(theirs, hf.load(folder, config), folder)


TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH))


def test_what_config_json_leaves_out_is_as_in_transformers():
    sizes = {**SIZES, "hidden_size": 192, "num_attention_heads": 96, "head_dim": 2}
    del sizes["num_key_value_heads"]
    for name in FAMILIES:
        theirs = getattr(transformers, f"{name}Config")(**sizes)
        ours = from_json({"architectures": [f"{name}ForCausalLM"], **sizes})
        assert ours.kv_heads == theirs.num_key_value_heads
        assert ours.tied == theirs.tie_word_embeddings
        assert ours.rotary.theta == theirs.rope_parameters["rope_theta"]
        if name != "Olmo":  # its norm has no setting
            assert ours.norm_eps == theirs.rms_norm_eps
        windows = name in ("Mistral", "Mixtral", "Qwen2", "Qwen3")
        assert ours.window == (theirs.sliding_window if windows else None)
        if ours.experts is not None:
            assert ours.experts.count == theirs.num_experts
            assert ours.experts.chosen == theirs.num_experts_per_tok
            assert ours.experts.normalized == getattr(theirs, "norm_topk_prob", True)
            assert ours.experts.aux_loss == theirs.router_aux_loss_coef
            assert ours.ffn == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)


def their_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.float().numpy()


def our_logits(model):
    graph, state = nnx.split(model)
    program = jax.jit(lambda s: nnx.merge(graph, s)(jnp.asarray(TOKENS)), compiler_options=QUICK)
    return np.asarray(program(state))


def gradients_by_their_names(model, folder):
    """Of our loss; written like a model, to have transformers' names and layouts."""
    graph, state = nnx.split(model)
    tokens = jnp.asarray(TOKENS)

    def loss(state):
        batch = Batch(tokens[:, :-1], tokens[:, 1:])
        return nnx.merge(graph, state).loss(batch, chunk=16, evaluate=True).mean

    gradients = jax.jit(jax.grad(loss), compiler_options=QUICK)(state)
    hf.save(folder, nnx.merge(graph, gradients))
    return {name: tensor.whole() for name, tensor in read_tensors(folder).items()}


def their_gradients(model):
    model.zero_grad()
    logits, labels = model(torch.tensor(TOKENS)).logits[:, :-1], torch.tensor(TOKENS)[:, 1:]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    grads = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return {name: grad for each in grads.items() for name, grad in in_files(model, *each)}


def in_files(model, name, grad):
    """A parameter as it is in files: those of experts, which are joined in memory, one by one."""
    mixtral = model.config.model_type == "mixtral"
    name = name.replace("mlp.", "block_sparse_moe.") if mixtral else name
    before, is_joined, joined = name.partition(".experts.")
    if not is_joined:
        return [(name, grad)]
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    parts = {down: grad}
    if joined == "gate_up_proj":
        parts = dict(zip((gate, up), np.split(grad, 2, axis=1), strict=True))
    return [
        (f"{before}.experts.{expert}.{part}.weight", of_one)
        for part, of_all in parts.items()
        for expert, of_one in enumerate(of_all)
    ]


def test_the_heads_of_a_llama_need_not_divide_its_width(tmp_path):
    """transformers refuses such a Llama, but not the Mistral without a window that equals it."""
    in_fp32 = {"param_dtype": jnp.float32, "dtype": jnp.float32}
    config = dataclasses.replace(SMALL, vocab=VOCABULARY, width=50, heads=6, **in_fp32)
    model = filled(config)
    hf.save(tmp_path, model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    theirs = their_logits(loaded)
    np.testing.assert_allclose(our_logits(model), theirs, atol=1e-4 * np.abs(theirs).max())
    assert hf.read_config(tmp_path) == config


def test_the_logits_and_gradients_are_theirs(pair, tmp_path):
    theirs = their_logits(pair.theirs)
    # Sums of some 100 products, a dozen deep, in FP32: 1e-4 is generous.
    np.testing.assert_allclose(our_logits(pair.ours), theirs, atol=1e-4 * np.abs(theirs).max())
    ours = gradients_by_their_names(pair.ours, tmp_path / "gradients")
    theirs = their_gradients(pair.theirs)
    assert set(ours) == set(theirs)
    for name, gradient in theirs.items():
        limit = 1e-4 * np.abs(gradient).max()
        np.testing.assert_allclose(ours[name], gradient, atol=limit, err_msg=name)


def test_a_penalty_of_routers_is_theirs(tmp_path):
    """Of one row and one layer: they join the rows and layers of a batch, which we average."""
    theirs = their_model("Olmoe", num_hidden_layers=1)
    theirs.save_pretrained(tmp_path)
    graph, state = nnx.split(hf.load(tmp_path))
    tokens = jnp.asarray(TOKENS[:1])
    # Their labels are shifted inside; the last token has none, but its routing counts.
    batch = Batch(tokens, jnp.append(tokens[:, 1:], jnp.int32([[-100]]), axis=1))
    loss = jax.jit(lambda s: nnx.merge(graph, s).loss(batch), compiler_options=QUICK)(state)
    with torch.no_grad():
        inputs = torch.tensor(TOKENS[:1])
        found = theirs(inputs, labels=inputs, output_router_logits=True)
    np.testing.assert_allclose(loss.statistics["aux_loss"] / loss.count, found.aux_loss, rtol=1e-5)
    np.testing.assert_allclose(loss.mean, found.loss, rtol=1e-5)


def test_in_bf16_it_is_as_near_to_fp32_as_theirs(pair):
    """Both round some 30 times per token, at other places; neither is the standard."""
    in_bf16 = dataclasses.replace(pair.ours.config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    ours = our_logits(hf.load(pair.folder, in_bf16))
    rounded = copy.deepcopy(pair.theirs).to(torch.bfloat16)
    theirs = their_logits(rounded)
    exact = their_logits(rounded.to(torch.float32))

    def distance(logits):
        # Of most tokens: where rounding chooses another expert, logits are far from exact.
        return np.sqrt(np.median(np.mean(np.square(logits - exact), axis=-1)))

    assert 0 < distance(ours) < 1.2 * distance(theirs)


def test_files_come_back_bit_for_bit_and_transformers_reads_them(pair, tmp_path):
    """And every entry of their config, but for those that say who wrote it."""
    hf.save(tmp_path, pair.ours, file_bytes=40_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    again = type(pair.theirs).from_pretrained(tmp_path)
    before, after = pair.theirs.state_dict(), again.state_dict()
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    np.testing.assert_array_equal(their_logits(again.eval()), their_logits(pair.theirs))
    before, after = (config.to_dict() for config in (pair.theirs.config, again.config))
    differ = {key for key in before if before[key] != after[key]}
    assert differ <= {"transformers_version", "dtype", "_name_or_path", "max_window_layers"} | (
        {"intermediate_size"} if "moe_intermediate_size" in before else set()
    )


def test_bf16_weights_stay_bf16_bit_for_bit(tmp_path):
    theirs = their_model("Qwen2").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = hf.load(tmp_path / "theirs")
    assert ours.embed[...].dtype == ours.config.dtype == jnp.bfloat16
    hf.save(tmp_path / "ours", ours)
    files = [(tmp_path / who / "model.safetensors") for who in ("theirs", "ours")]
    tensors = [safetensors_torch.load_file(file) for file in files]
    assert set(tensors[0]) == set(tensors[1])
    for name, tensor in tensors[0].items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, tensors[1][name]), name
