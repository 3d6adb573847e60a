"""Hugging Face folders come back bit for bit, and what a Config cannot say is refused by name."""

import dataclasses
import itertools
import json
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_cases import AXES, automatic_mesh, variant
from small_model import assert_same_files, assert_same_model, files_of, filled, rewrite

from coat_jax import models, ops
from coat_jax.errors import UserError
from coat_jax.models import hf
from coat_jax.models.hf.config import ARCHITECTURES, from_json, to_json
from coat_jax.models.hf.files import NewTensors, read_tensors
from coat_jax.ops import Llama3Scaling, Rotary

PLAIN = {"qk_norm": None, "norm_eps": 1e-5, "precision": "bf16"}
EXPERTS = models.Experts(count=3, chosen=2, aux_loss=0.02, z_loss=0.003)
LLAMA = variant(**PLAIN, rotary=Rotary(5e5, Llama3Scaling()))
FAMILY = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": variant(**PLAIN, window=8),
    "Qwen2ForCausalLM": variant(**PLAIN, qkv_bias=True, tied=True, rotary=Rotary(1e6, 4.0)),
    "Qwen3ForCausalLM": variant(precision="bf16", window=8, tied=True),
    "OlmoForCausalLM": variant(**PLAIN, norm="layer"),
    "Olmo2ForCausalLM": variant(**{**PLAIN, "qk_norm": "all"}, norms="after"),
    "MixtralForCausalLM": variant(**PLAIN, window=8, experts=EXPERTS),
    "Qwen3MoeForCausalLM": variant(precision="bf16", tied=True, experts=EXPERTS),
    "OlmoeForCausalLM": variant(
        **{**PLAIN, "qk_norm": "all"}, experts=dataclasses.replace(EXPERTS, normalized=False)
    ),
}


# --- There and back --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_saved_model_comes_back_bit_for_bit(tmp_path, family):
    """Stacked layers in FP32, and for every other family a list of layers in BF16."""
    scan = list(ARCHITECTURES).index(family) % 2 == 0
    dtype = jnp.float32 if scan else jnp.bfloat16
    config = dataclasses.replace(FAMILY[family], param_dtype=dtype, dtype=dtype, scan=scan)
    model = filled(config)
    hf.save(tmp_path, model)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["architectures"] == [family]
    read = hf.read_config(tmp_path)
    assert dataclasses.replace(read, scan=scan) == config
    assert_same_model(hf.load(tmp_path, config), model)


def test_files_may_be_many_and_layers_lists_or_stacks(tmp_path):
    """The same tensors in one file or in many, from stacked layers or from a list."""
    model = filled(LLAMA)
    hf.save(tmp_path / "one", model)
    hf.save(tmp_path / "many", model, file_bytes=50_000)
    unrolled = hf.load(tmp_path / "many", dataclasses.replace(LLAMA, scan=False))
    hf.save(tmp_path / "list", unrolled, file_bytes=50_000)
    wanted = files_of(tmp_path / "one")
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    for folder in (tmp_path / "many", tmp_path / "list"):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        assert {path.name for path in files} == set(index["weight_map"].values())
        assert len(files) > 2
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in wanted.values())
        assert set(wanted) == set(index["weight_map"])
        assert_same_files(folder, tmp_path / "one")
    assert_same_model(hf.load(tmp_path / "list", LLAMA), model)


def test_each_expert_has_tensors_of_its_own(tmp_path):
    model = filled(FAMILY["OlmoeForCausalLM"])
    hf.save(tmp_path, model)
    found = files_of(tmp_path)
    mlp, prefix = model.layers.mlp, "model.layers.1.mlp."
    np.testing.assert_array_equal(found[prefix + "gate.weight"], mlp.router[...][1].T)
    for name in ("gate", "up", "down"):
        weight = getattr(mlp, name)[...]
        np.testing.assert_array_equal(
            found[f"{prefix}experts.2.{name}_proj.weight"], weight[1, 2].T
        )


def test_weights_are_stored_as_asked_and_cast_as_asked(tmp_path):
    model = filled(LLAMA)
    hf.save(tmp_path, model, dtype=jnp.bfloat16, extra={"eos_token_id": 7})
    assert {t.dtype.name for t in files_of(tmp_path).values()} == {"bfloat16"}
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 7
    assert hf.read_config(tmp_path).param_dtype == jnp.bfloat16
    rounded = jax.tree.map(
        lambda x: jax.device_put(np.asarray(x).astype(jnp.bfloat16).astype(x.dtype)),
        nnx.state(model),
    )
    assert_same_model(hf.load(tmp_path, LLAMA), nnx.merge(nnx.graphdef(model), rounded))


@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (3, 4, 6), (2, 3, 4, 5)])
def test_tensors_are_written_in_parts_cut_anywhere(shape, tmp_path):
    wanted = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    new = NewTensors(tmp_path / "new", {"a": (shape, wanted.dtype)}, file_bytes=1 << 20)
    halves = [(slice(0, n // 2), slice(n // 2, n)) for n in shape]
    for index in itertools.product(*halves):
        new.write("a", index, wanted[index])
    new.finish({})
    found = read_tensors(tmp_path / "new")["a"]
    np.testing.assert_array_equal(found.whole(), wanted)


def test_on_a_mesh_each_device_reads_its_own_part(tmp_path, monkeypatch):
    model = filled(LLAMA)
    hf.save(tmp_path, model)
    shares = {}

    def recorded(folder, *how):
        def read(name, one, index):
            part = one.read(index)
            shares.setdefault(name, set()).add(part.size / math.prod(one.shape))
            return part

        tensors = read_tensors(folder, *how).items()
        return {name: one._replace(read=partial(read, name, one)) for name, one in tensors}

    monkeypatch.setattr("coat_jax.models.hf.weights.read_tensors", recorded)
    mesh = automatic_mesh(2, 2, 2)
    sharded = hf.load(tmp_path, dataclasses.replace(LLAMA, **AXES), mesh=mesh)
    assert_same_model(sharded, model)
    for parameter in (sharded.embed, sharded.head, sharded.layers.mlp.gate):
        assert parameter[...].addressable_shards[0].data.size == parameter[...].size // 4
    assert all(of == {0.25} for name, of in shares.items() if "norm" not in name)
    hf.save(tmp_path / "again", sharded)
    assert_same_files(tmp_path / "again", tmp_path)


@pytest.mark.parametrize("name", models.PRESETS)
def test_presets_pass_through_config_json(name):
    stored = {"param_dtype": jnp.bfloat16, "precision": "bf16"}
    config = dataclasses.replace(models.PRESETS[name], **stored)
    assert from_json(json.loads(json.dumps(to_json(config, jnp.bfloat16)))) == config


# --- What is in config.json ------------------------------------------------------------------


def config_json(family="LlamaForCausalLM", **changes):
    data = {**to_json(FAMILY[family], jnp.float32), **changes}
    return {name: value for name, value in data.items() if value != "absent"}


def test_both_ways_to_write_rotary_positions_are_read():
    scaling = config_json()["rope_scaling"]
    recent = {"rope_parameters": {"rope_theta": 5e5, **scaling}}
    absent = {"rope_theta": "absent", "rope_scaling": "absent"}
    assert from_json(config_json(**absent, **recent)).rotary == LLAMA.rotary
    assert from_json(config_json(**absent)).rotary == Rotary(10000.0)
    for none in ("absent", None, {}):  # as in transformers
        assert from_json(config_json(rope_scaling=none)).rotary == Rotary(5e5)
    old = {"rope_scaling": {"type": "linear", "factor": 2}}
    assert from_json(config_json(**old)).rotary == Rotary(5e5, 2.0)
    for inside in ({}, {ORIGINAL: 32}):  # what stands beside rope_scaling comes first
        config = from_json(config_json(rope_scaling=ROPE | inside, **{ORIGINAL: 16}))
        assert config.rotary.scaling.original_context == 16


def test_missing_entries_have_transformers_defaults():
    left_out = dict.fromkeys(("head_dim", "num_key_value_heads", "tie_word_embeddings"), "absent")
    config = from_json(config_json(**left_out))
    assert (config.head_dim, config.kv_heads, config.tied) == (64 // 4, 4, False)
    assert from_json(config_json("Qwen3ForCausalLM", head_dim="absent")).head_dim == 128
    assert from_json(config_json("MistralForCausalLM", sliding_window="absent")).window == 4096
    assert from_json(config_json("Olmo2ForCausalLM", rms_norm_eps="absent")).norm_eps == 1e-5
    assert from_json(config_json(rms_norm_eps="absent")).norm_eps == 1e-6


def test_key_heads_that_config_json_leaves_out_are_those_of_transformers():
    """Where it says null, there are as many as query heads."""
    heads = {"Llama": 64, "Mistral": 8, "Qwen2": 32, "Qwen3": 32, "Olmo": 64, "Olmo2": 64}
    heads |= {"Mixtral": 8, "Qwen3Moe": 4, "Olmoe": 64}
    for family, number in heads.items():
        for value, wanted in (("absent", number), (None, 64)):
            changes = {"num_attention_heads": 64, "head_dim": 2, "num_key_value_heads": value}
            assert from_json(config_json(f"{family}ForCausalLM", **changes)).kv_heads == wanted


def test_the_number_of_experts_has_two_names():
    data = config_json("Qwen3MoeForCausalLM", num_experts="absent", num_local_experts=5)
    assert from_json(data).experts.count == 5


def test_a_window_is_used_where_config_json_says_so():
    def window(**changes):
        return from_json(config_json("Qwen3ForCausalLM", **changes)).window

    assert window() == 8
    assert window(use_sliding_window=False) is None
    assert window(max_window_layers=2) is None
    assert window(max_window_layers="absent") is None  # 28, and there are 2 layers
    assert window(layer_types=["full_attention"] * 2) is None
    for window_of in (8, None):
        changes = {"sliding_window": window_of, "layer_types": SLIDING if window_of else FULL}
        assert from_json(config_json("MistralForCausalLM", **changes)).window == window_of


FULL, SLIDING = ["full_attention"] * 2, ["sliding_attention"] * 2
MISTRAL = [  # where transformers ignores layer_types: all layers have the window
    ({"layer_types": FULL}, r"mistral \['full.* with a window of 8: here all have sliding_att"),
    ({"layer_types": [FULL[0], SLIDING[0]]}, "window of 8: here all have sliding_attention"),
    ({"layer_types": SLIDING, "sliding_window": None}, "of None: here all have full_attention"),
    ({"num_key_value_heads": "absent"}, "heads=4 must be a multiple of kv_heads=8"),
]
QWEN3 = [
    ({"layer_types": SLIDING, "use_sliding_window": False}, "window of None: here all have full"),
    ({"max_window_layers": 1}, "2 layers of a qwen3 .*of 8: here all have full_attention or sl"),
    *(
        ({"layer_types": kinds}, f"qwen3 {re.escape(str(kinds))} .* or layer_types")
        for kinds in (FULL[:1], [], ["chunked_attention"] * 2, 3)
    ),
    ({"sliding_window": 0}, "sliding_window=0 must be a whole number from 1"),
    ({"max_window_layers": None}, "max_window_layers=None must be a whole number"),
    ({"use_sliding_window": "yes"}, "use_sliding_window='yes' must be True or False"),
]
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
SIZES += ("intermediate_size", "max_position_embeddings", "num_key_value_heads")


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_cannot_be_meant_are_refused_by_their_names(name):
    for value in (0, -1, 1.5, 10**9, 10**20, float("inf"), "64", [64], True):
        with pytest.raises(UserError, match=f"config.json: {name}=.* must be a whole number from"):
            from_json(config_json(**{name: value}))


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
LLAMAS = [
    ({"rope_theta": float("nan")}, "rope_theta=nan must be"),
    ({"rope_theta": 1e30}, "rope_theta=1e.30 must be"),
    ({"rope_theta": None}, "rope_theta=None must be"),
    *(
        ({name: value}, rf"{name}={re.escape(repr(value))} must be a dict or None")
        for name in ("rope_scaling", "rope_parameters")
        for value in (8, 0, "", [], False)
    ),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor=None must be"),
    ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor=-1 must be"),
    ({"rope_scaling": {"type": ["linear"]}}, r"type=\['linear'\], which coat_jax does not"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "type='yarn', which coat_jax"),
    ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor=0.5"),
    ({"rope_scaling": {"full_attention": {}, "x": {}}}, "different rotary positions for full"),
    ({"rope_scaling": ROPE | {"factor": None}}, "rope_scaling.factor=None must be"),
    ({"rope_scaling": ROPE | {"low_freq_factor": 4}}, "must be below high_freq_factor"),
    ({"rope_scaling": ROPE | {ORIGINAL: "x"}}, f"{ORIGINAL}='x' must be"),
    ({"rope_scaling": ROPE, ORIGINAL: 0}, f"{ORIGINAL}=0 must be"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be"),
    ({"architectures": "LlamaForCausalLM" * 99}, "names the architecture 'Llama"),
    ({"architectures": [["x"]]}, r"names the architecture \['x'\]"),
    ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'. There are LlamaForCausalLM"),
    ({"architectures": "absent"}, "the architecture 'none'"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be True or False"),
    ({"torch_dtype": "int8"}, "dtype='int8' must be 'float32' or 'bfloat16' or 'float16'"),
    *(({"torch_dtype": value}, "dtype=.* must be 'float32'") for value in (16, 0, [], {}, "")),
    ({"dtype": False, "torch_dtype": "float32"}, "dtype=False must be"),
    ({"hidden_act": "mish"}, "hidden_act='mish', which coat_jax does not support"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ({"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ({"swiglu_limit": 7.0}, "swiglu_limit=7.0"),
    ({"quantization_config": {"bits": 4}}, "quantization_config="),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"vocab_size": "absent"}, "vocab_size=None must be a whole number"),
    ({"num_key_value_heads": 3}, "heads=4 must be a multiple of kv_heads=3"),
]


QWEN3_MOE = [
    ({"decoder_sparse_step": 2}, "decoder_sparse_step=2, which coat_jax does not support"),
    ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\], which"),
    ({"use_sliding_window": True}, "use_sliding_window=True, which"),
    ({"num_experts": 0}, "config.json: num_experts=0 must be a whole number from 1"),
    ({"num_experts_per_tok": 4}, "experts.chosen=4 must be at most experts.count=3"),
    ({"norm_topk_prob": 1}, "norm_topk_prob=1 must be True or False"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size=None must be"),
]


REFUSED = {"Llama": LLAMAS, "Mistral": MISTRAL, "Qwen3": QWEN3, "Qwen3Moe": QWEN3_MOE}


@pytest.mark.parametrize(
    ("family", "changes", "message"), [(f, *case) for f, cases in REFUSED.items() for case in cases]
)
def test_what_a_config_json_cannot_mean_or_we_cannot_do_is_refused(family, changes, message):
    with pytest.raises(UserError, match=message):
        from_json(config_json(f"{family}ForCausalLM", **changes))


def test_an_activation_is_read_and_written():
    names = {None: "silu", "silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
    for theirs, ours in names.items():
        config = from_json(config_json(hidden_act=theirs))
        assert config.activation == ours
        assert to_json(config, jnp.float32)["hidden_act"] == (theirs or "silu")


NONE = "No architecture of transformers computes"


def test_a_model_that_transformers_does_not_have_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setitem(ops.ACTIVATIONS, "tanh", jnp.tanh)
    for changes, message in (
        ({"activation": "tanh"}, r"cannot compute activation='tanh': .* silu, gelu,"),
        ({"activation_limit": 10}, "cannot compute a llama with activation_limit=10: generate"),
        ({"norms": "after"}, NONE),
        ({"qkv_bias": True, "qk_norm": "head"}, NONE),
        ({"norm": "layer", "norm_eps": 1e-6}, NONE),
        ({"norms": "after", "qk_norm": "all", "window": 4}, NONE),
        ({"experts": dataclasses.replace(EXPERTS, normalized=False)}, NONE),
        ({"experts": dataclasses.replace(EXPERTS, bias_rate=0.1)}, NONE),
        ({"experts": EXPERTS, "qk_norm": "all", "head_dim": 32}, NONE),
    ):
        with pytest.raises(UserError, match=message):
            hf.save(tmp_path, filled(dataclasses.replace(LLAMA, **changes)))
    assert list(tmp_path.iterdir()) == []


# --- What is in the files --------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    hf.save(tmp_path, filled(FAMILY["Qwen2ForCausalLM"]))
    return tmp_path


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q: None}, rf"does not match its config: it lacks {Q}\."),
        ({"score.weight": np.zeros(3, np.float32)}, r"it also has score\.weight"),
        ({Q: np.zeros((64, 63), np.float32)}, rf"has {Q} \(64, 63\) instead of \(64, 64\)"),
        ({Q: np.zeros((64, 64), np.int8)}, f"{Q} in .* is stored as I8"),
        (
            {"lm_head.weight": np.zeros((256, 64), np.float32)},
            "ties head and embedding, and lm_head.weight differs",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, changes, message):
    rewrite(folder, **changes)
    with pytest.raises(ValueError, match=message):
        hf.load(folder)


def test_a_folder_of_fewer_or_more_layers_is_refused_before_a_model_is_built(folder):
    for layers, scan, message in (
        (1, True, r"also has model\.layers\.1\."),
        (10_000, False, r"lacks model\.layers\.10\..* and 119971 more"),
    ):
        config = dataclasses.replace(hf.read_config(folder), layers=layers, scan=scan)
        with pytest.raises(UserError, match=message):
            hf.load(folder, config)


def test_tensors_that_say_nothing_new_are_passed_over(folder):
    embedding = files_of(folder)["model.embed_tokens.weight"]
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    rewrite(folder, **{"lm_head.weight": embedding}, **frequencies)
    assert hf.load(folder).head is None


def test_files_that_are_not_there_are_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere\. Download the model"):
        hf.load(tmp_path / "nowhere", LLAMA)
    with pytest.raises(FileNotFoundError, match=r"There is no file .*config.json"):
        hf.load(tmp_path / "nowhere")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (folder / "model.safetensors").symlink_to("blob")  # as of a hub's cache without its blobs
    with pytest.raises(FileNotFoundError, match=r"model.safetensors is a link to blob, which"):
        hf.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors .* 'pytorch_model.bin'"):
        hf.load(folder)


def test_an_index_that_is_wrong_is_refused(folder):
    names = {*files_of(folder)}

    def index_of(names):
        return json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})

    rewrite(folder, **{Q: None})
    for index, message in (
        ("[]", "is not a JSON object, but list"),
        ("{}", "has no weight_map: it is no index of tensors"),
        ('{"weight_map": {"a": 3}}', "names the file 3, not in"),
        ('{"weight_map": {"a": "b\\u0000"}}', r"names the file 'b\\x00', not in"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names the file '../model.safetensors'"),
        (index_of(names), rf"says that {Q} is in model.safetensors"),
    ):
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(UserError, match=message):
            hf.load(folder)


def test_a_model_is_not_written_over_another_or_into_the_folder_of_a_run(folder, tmp_path):
    model = hf.load(folder)
    for there in ("config.json", "checkpoints"):
        run = tmp_path / f"run with {there}"
        run.mkdir()
        (run / there).write_text("{}")
        with pytest.raises(UserError, match=f"holds a model already: {there}. Name another one"):
            hf.save(run, model)
        assert [(path.name, path.read_text()) for path in run.iterdir()] == [(there, "{}")]
    with pytest.raises(UserError, match=r"holds a model already: model\.safetensors"):
        hf.save(folder, model)
