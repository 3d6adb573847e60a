"""`coat convert`: runs and Hugging Face folders are copied bit for bit, in little memory."""

import dataclasses
import errno
import json
import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_cases import save_run, write_config, write_words
from flax import nnx
from forks import Fork
from model_cases import automatic_mesh
from processes import outputs
from small_model import FAMILIES, SMALL, assert_same_files, change, filled, rewrite

from coat_jax.cli import main
from coat_jax.models import hf, lazy_arrays
from coat_jax.models.hf.files import NewTensors
from coat_jax.nn import MeshAxes
from coat_jax.ops import Llama3Scaling, Rotary
from coat_jax.precision import BF16
from coat_jax.training.checkpoint import conversion, weights

LLAMA = dataclasses.replace(
    SMALL,
    width=48,
    ffn=80,
    precision="coat",
    rotary=Rotary(5e5, Llama3Scaling(original_context=32)),
)


def variant(family="llama", dtype=jnp.bfloat16, **changes):
    both = {"param_dtype": dtype, "dtype": dtype}
    return dataclasses.replace(LLAMA, **both, **FAMILIES[family], **changes)


QWEN = variant("qwen3")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    hf.save(folder, filled(QWEN), extra={"eos_token_id": [7, 8]})
    write_words(folder / "tokenizer.json", "yes")
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    return folder


@pytest.fixture
def theirs(original, tmp_path):
    """A Hugging Face folder."""
    return shutil.copytree(original, tmp_path / "theirs")


@pytest.fixture
def run(tmp_path):
    """The same model as a run."""
    return save_run(tmp_path / "run", filled(QWEN))


def special_tokens(folder, name="config.json"):
    found = json.loads((folder / name).read_text())
    return {key: token for key, token in found.items() if key.endswith("_token_id")}


def convert(*arguments):
    return main(["convert", *map(str, arguments)])


# --- The same model --------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exported_bit_for_bit(family, tmp_path, monkeypatch):
    """Also from a Hugging Face folder, in pieces that do not divide the tensors."""
    monkeypatch.setattr(lazy_arrays, "PIECE", 5000)
    model = filled(variant(family, jnp.float32 if family == "olmo" else jnp.bfloat16))
    hf.save(tmp_path / "theirs", model)
    save_run(tmp_path / "run", model)
    config_json = json.loads((tmp_path / "theirs" / "config.json").read_text())
    for name in ("run", "theirs"):
        out = tmp_path / f"of_{name}"
        conversion.convert(tmp_path / name, out, file_bytes=50_000)
        assert len(list(out.glob("*.safetensors"))) > 2
        assert_same_files(out, tmp_path / "theirs")
        assert json.loads((out / "config.json").read_text()) == config_json
    again = weights.load(out)
    assert again.config == dataclasses.replace(model.config, precision=BF16)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


def test_another_dtype_may_be_asked_for(theirs, tmp_path, capsys):
    """A wider one changes no number. The tokenizer is copied."""
    assert convert(theirs, tmp_path / "wide", "--dtype", "float32") == 0
    assert f"{tmp_path / 'wide'} is a Hugging Face folder." in capsys.readouterr().out
    model = weights.load(tmp_path / "wide")
    assert model.config.param_dtype == model.config.dtype == model.embed[...].dtype == jnp.float32
    assert convert(tmp_path / "wide", tmp_path / "again", "--dtype", "bfloat16") == 0
    assert_same_files(theirs, tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_text() == (theirs / name).read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "wide", "again"}


@pytest.mark.parametrize(("own", "end"), [({}, [7, 8]), ({"eos_token_id": 9}, 9)])
def test_special_tokens_are_copied_from_whatever_file_has_them(own, end, theirs, tmp_path):
    generation = {"eos_token_id": None, "temperature": 0.6} | own
    (theirs / "generation_config.json").write_text(json.dumps(generation))
    change(theirs, bos_token_id=1, pad_token_id=2)
    assert convert(theirs, tmp_path / "again") == 0
    expected = {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": end}
    for name in ("config.json", "generation_config.json"):
        assert special_tokens(tmp_path / "again", name) == expected
    generation = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert generation["temperature"] == 0.6


def test_a_run_may_begin_from_either_folder(theirs, run):
    """As `coat train` would: on its mesh, in its dtypes, with its layers taken apart."""
    mesh = automatic_mesh(1, 2, 2)
    config = dataclasses.replace(
        variant("qwen3", jnp.float32, scan=False, precision="coat"),
        axes=MeshAxes("fsdp", "tensor"),
        batch_axes=("data", "fsdp"),
    )
    got = weights.load(run, config, mesh=mesh)
    wanted = hf.load(theirs, config, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(got), nnx.state(wanted))
    gate = got.layers[0].mlp.gate[...]
    assert gate.addressable_shards[0].data.size == gate.size // 4


@pytest.mark.parametrize("scan", [True, False])
def test_a_checkpoint_of_training_is_exported(scan, tmp_path):
    """With moments beside the parameters, and of the step that is asked for."""
    run = tmp_path / "run"
    config = variant("olmo2", jnp.float32, scan=scan)
    written = [filled(config), filled(config, seed=1)]
    save_run(run, *written)
    write_config(run, config, data={"tokenizer": str(run / "words.json")})
    write_words(run / "words.json", "yes")
    for step, model in ((None, written[1]), (1, written[0])):
        out = tmp_path / f"out{step}"
        assert convert(run, out, *(["--step", step] if step else [])) == 0
        got = hf.load(out, config)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(got), nnx.state(model))
        assert (out / "tokenizer.json").read_bytes() == (run / "words.json").read_bytes()


ON_TOKENS = {"train": ["tokens/*.npy"], "tokenizer": None}
ON_BYTES = {"train": ["corpus"], "tokenizer": None}


@pytest.mark.parametrize(
    ("data", "written", "words", "end"),
    [
        (ON_TOKENS, 3, None, 3),
        (ON_BYTES, 0, None, 0),
        (ON_BYTES | {"end_of_text": 3}, None, None, 3),
        ({}, None, ["no", "</s>"], 2),
        ({}, None, [], None),
    ],
)
def test_an_export_knows_where_a_text_ends_and_says_what_it_lacks(
    data, written, words, end, run, tmp_path, capsys
):
    """From what the run wrote, from its config, or from its tokenizer."""
    write_config(run, QWEN, data=data)
    if written is not None:
        (run / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
    if words is not None:
        write_words(run / "tokenizer.json", "yes", *words)
    assert convert(run, tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert said.count("\n") == ("train" in data)
    assert ("--tokenizer FILE" in said) == ("train" in data)
    assert special_tokens(tmp_path / "out").get("eos_token_id") == end
    assert (tmp_path / "out" / "tokenizer.json").exists() == (words is not None)


def test_a_tokenizer_must_fit_the_model(theirs, run, tmp_path, capsys):
    """Whose vocabulary may be larger; a token that was added for padding does not count."""
    (theirs / "tokenizer.json").unlink()
    words, out = tmp_path / "words.json", tmp_path / "out"
    write_words(words, "yes", *map(str, range(LLAMA.vocab)))
    for source in (theirs, run):
        assert convert(source, out, "--tokenizer", words) == 2
        said = capsys.readouterr().err
        assert f"has a vocabulary of {LLAMA.vocab + 1}, and the model one of" in said
        assert not out.exists()
    write_words(words, "yes", *map(str, range(LLAMA.vocab - 1)), special=["<pad>"])
    assert convert(run, out, "--tokenizer", words) == 0
    assert capsys.readouterr().err == ""
    assert (out / "tokenizer.json").read_bytes() == words.read_bytes()


def test_a_tokenizer_that_begins_texts_otherwise_than_training_is_noted(run, tmp_path, capsys):
    noted = "puts no in front of each text, and training put nothing"
    for name, single, said in (("a", "no $A", noted), ("b", "$A no", "")):
        write_words(run / "tokenizer.json", "yes", "no", template=single)
        assert convert(run, tmp_path / name) == 0
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == bool(said)


# --- In little memory ------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("to", [[], ["int8"]])
def test_a_model_is_never_in_memory_as_a_whole(to, tmp_path):
    """The process grows by a third of a model of more than 50 MB at most.

    Where it rounds, once the programs are compiled: a model of one layer has the same.
    """
    sizes = {"width": 512, "ffn": 1024, "vocab": 2048, "heads": 8, "head_dim": 64}
    for name, layers in (("tiny", 1), ("large", 30)):
        hf.save(tmp_path / name / "theirs", filled(variant(layers=layers, **sizes)))
    large = tmp_path / "large"
    size = sum(path.stat().st_size for path in (large / "theirs").iterdir())
    assert size > 50e6
    script = Path(__file__).with_name("converting.py")
    (grown,) = outputs([Fork([script, tmp_path, *to])])
    assert int(grown) < size / 3
    if not to:
        assert_same_files(large / "theirs", large / "new")
    shutil.rmtree(large)


# --- Refusals --------------------------------------------------------------------------------


def assert_refused(capsys, tmp_path, *arguments, named, code=2):
    before = sorted(tmp_path.rglob("*"))
    assert convert(*arguments) == code
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def lead_nowhere(path):
    path.unlink()
    path.symlink_to("nowhere")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: change(f, architectures=["GPT2LMHeadModel"]), "'GPT2LMHeadModel'. There are"),
        (lambda f: rewrite(f, **{NORM: None}), f"lacks {NORM}"),
        (lambda f: (f / "model.safetensors").unlink(), "There is no model.safetensors"),
        (lambda f: os.truncate(f / "model.safetensors", 10_000), "is damaged or truncated"),
        (lambda f: (f / "config.json").unlink(), "there is no config.json in it"),
        (lambda f: (f / "config.json").write_text("{}"), "neither the `model` of a run nor"),
        (lambda f: lead_nowhere(f / "config.json"), "config.json is a link to nowhere"),
        (shutil.rmtree, "there is no such folder"),
    ],
)
def test_folders_that_are_no_model_are_refused(damage, named, theirs, tmp_path, capsys):
    damage(theirs)
    assert_refused(capsys, tmp_path, theirs, tmp_path / "out", named=named)


def test_nothing_is_overwritten(theirs, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    assert_refused(capsys, tmp_path, theirs, out, named=f"{out} exists already")
    out.rename(tmp_path / "out.unfinished")
    assert_refused(capsys, tmp_path, theirs, out, named="another `coat convert` is writing it")
    out.symlink_to("nowhere")
    assert_refused(capsys, tmp_path, theirs, out, named=f"{out} exists already")


@pytest.mark.parametrize("to", [[], ["--to", "int8"]])
def test_numbers_that_a_dtype_does_not_hold_are_refused(to, theirs, tmp_path, capsys):
    """FP16 would make infinities of them."""
    rewrite(theirs, **{NORM: np.full(48, 1e5, jnp.bfloat16)})
    arguments = [theirs, tmp_path / "out", "--dtype", "float16", *to]
    assert_refused(capsys, tmp_path, *arguments, named="99840, and float16 ends at 65504")


def test_a_run_without_a_whole_checkpoint_is_refused(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert_refused(capsys, tmp_path, run, out, "--step", "5", named="no checkpoint of step 5")
    (run / "checkpoints" / "1" / "record.json").write_text("{}")
    for step in ([], ["--step", 1]):
        named = "record.json has 2 bytes instead of"
        assert_refused(capsys, tmp_path, run, out, *step, named=named)
    (run / "checkpoints" / "1").rename(run / "checkpoints" / "1.unfinished")
    assert_refused(capsys, tmp_path, run, out, named="There is no checkpoint in")


def test_a_config_of_another_model_is_refused(run, tmp_path, capsys):
    said = json.loads((run / "config.json").read_text())
    for changes, named in (
        ({"rotary": {}}, "config.json: model.rotary lacks scaling, theta: it is damaged"),
        ({"sizes": 3}, "config.json: model has sizes: it is damaged, or was written by another"),
        ({"qk_norm": None}, "it also has layers.attention.key_norm.scale"),
        ({"layers": 3}, "it has layers.attention.key (2, "),
        ({"tied": False}, "it lacks head"),
        ({"qkv_bias": True, "norms": "after"}, "No architecture of transformers computes"),
    ):
        (run / "config.json").write_text(json.dumps({"model": said["model"] | changes}))
        assert_refused(capsys, tmp_path, run, tmp_path / "out", named=named)


def test_a_full_or_failing_disk_leaves_nothing_behind(theirs, tmp_path, capsys, monkeypatch):
    """It is found before anything is written, or while tensors are read or written."""
    arguments = [theirs, tmp_path / "out"]
    for place, name, number, named, code in (
        (NewTensors, "write", errno.ENOSPC, "out does not fit in", 3),
        (np, "memmap", errno.EIO, "model.safetensors cannot be read: Input/output error", 2),
    ):
        with monkeypatch.context() as failing:
            error = OSError(number, os.strerror(number))
            failing.setattr(place, name, mock.Mock(side_effect=error))
            assert_refused(capsys, tmp_path, *arguments, named=named, code=code)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert_refused(capsys, tmp_path, *arguments, named="does not fit in", code=3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(number, theirs, tmp_path, monkeypatch):
    monkeypatch.setattr(NewTensors, "write", lambda *_: os.kill(os.getpid(), number))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit, match=str(128 + number)):
            convert(theirs, tmp_path / "out")
    finally:
        signal.signal(number, before)
    assert [*tmp_path.iterdir()] == [theirs]
