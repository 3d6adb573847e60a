"""`coat formats`: its numbers are the quantizer's and telemetry's, from whatever folder."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_cases import write_words
from old_runs import forget_config
from small_model import filled

from coat_jax import cli, models
from coat_jax.models import hf
from coat_jax.numerics.quantizer import Quantizer, sqnr_bits
from coat_jax.training.checkpoint import conversion, weights
from coat_jax.training.report import best_formats

# Those of attention are alike: a program is compiled for each shape and format.
CONFIG = models.Config(
    vocab=256,
    width=32,
    layers=1,
    heads=2,
    kv_heads=2,
    head_dim=16,
    ffn=48,
    context=64,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    precision="bf16",
    scan=False,
)
FEW = ["--formats", "INT8", "E4M3", "--fit", "max"]
MATRICES = 2 + 7


MODEL = filled(CONFIG)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs") / "model"
    hf.save(folder, MODEL)
    return folder


def asked(capsys, *arguments):
    assert cli.main(["formats", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_numbers_are_the_quantizers(theirs, capsys):
    found = json.loads(asked(capsys, theirs, *FEW, "--json"))
    rows = {row["tensor"]: row for row in found["weights"]}
    assert len(rows) == MATRICES
    gate = MODEL.layers[0].mlp.gate[...]
    embed = MODEL.embed[...]
    for tensor, x, axis in (("layers.0.mlp.gate", gate, -1), ("embed", embed, 0)):
        row = rows[tensor]
        assert row["shape"] == list(x.shape)
        for name in ("INT8", "E4M3"):
            quantizer = Quantizer(name, "channel", axis=axis)
            bits = jax.jit(lambda x, quantizer=quantizer: sqnr_bits(x, quantizer(x)))(x)
            assert row["bits"][name] == pytest.approx(float(bits), rel=1e-4)
        assert row["best"] == "INT8"  # of normal numbers


def test_a_run_and_a_hugging_face_folder_say_the_same(theirs, tmp_path, capsys):
    conversion.convert(theirs, tmp_path / "ours")
    one, other = (asked(capsys, f, *FEW, "--over", "tensor") for f in (theirs, tmp_path / "ours"))
    assert one == other
    lines = one.splitlines()
    assert lines[0].split() == ["weights", "INT8", "E4M3", "best"]
    assert len(lines) == 1 + MATRICES + 3
    assert f"best: INT8 for {MATRICES} of {MATRICES}; mean bits: INT8 6." in lines[-2]


def test_a_sample_has_whole_channels(theirs):
    config = weights.model_config(theirs)
    parameters = hf.read(theirs, config)
    one = best_formats.arrange(parameters, scan=False)["layers", 0, "mlp", "gate"]
    x = one.read((slice(None),) * 2)
    few = best_formats._sample(one, Quantizer("INT8", "channel"), -1, x.shape[0] * 3)
    np.testing.assert_array_equal(few, x[:, [0, x.shape[1] // 2 - 1, x.shape[1] - 1]])
    few = best_formats._sample(one, Quantizer("INT8", "group"), -1, x.shape[1] * 2)
    np.testing.assert_array_equal(few, x[[0, -1]])


def test_a_text_shows_the_error_of_each_tensor_in_training(theirs, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("def main():\n    return 'a text of some length'\n" * 2)
    given = [theirs, "--formats", "INT8", "E5M2", "--text", text, "--fit", "max", "--json"]
    found = json.loads(asked(capsys, *given))
    assert list(found) == ["model", "settings", "weights", "in_training"]
    rows = found["in_training"]
    tensors = {row["tensor"] for row in rows}
    assert {"layers/0/attention/input", "layers/0/mlp/down/gradient"} <= tensors
    for row in rows:
        assert 1.5 < row["bits"]["E5M2"] < 5
        assert 1.5 < row["bits"]["INT8"] < 8
        assert row["best"] in row["bits"]


def test_a_text_is_read_with_the_tokenizer_that_the_run_was_trained_with(
    theirs, tmp_path, capsys, monkeypatch
):
    read = []
    monkeypatch.setattr(best_formats, "in_training", lambda *given: read.append(given[-1]) or [])
    run, text = tmp_path / "run", tmp_path / "text.txt"
    conversion.convert(theirs, run)
    text.write_text("yes")
    elsewhere = write_words(tmp_path / "words.json", "yes", "no")
    said = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(said | {"data": {"tokenizer": str(elsewhere)}}))
    forget_config(run / "checkpoints" / "0")
    assert cli.main(["formats", str(run), *FEW, "--text", str(text)]) == 2
    assert "text.txt has 1 token: give 2 or more" in capsys.readouterr().err
    asked(capsys, run, *FEW, "--text", text, "--tokenizer", "bytes", "--json")
    assert [list(tokens) for tokens in read] == [list(b"yes")]


def test_values_of_the_format_are_right_to_all_bits():
    bits = functools.partial(best_formats._bits, Quantizer("INT8"))
    ones, zeros = bits(np.full((4, 4), 1.5, np.float32)), bits(np.zeros((4, 4), np.float32))
    assert min(float(ones), best_formats.EXACT) == min(float(zeros), best_formats.EXACT) == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is neither the folder of a run nor one of Hugging Face"),
        (["{model}", "--formats", "FP4"], "'FP4' does not name a small float: write E and M"),
        (["{model}", "--formats", "UE4M4"], "UE4M4 has no sign, and weights have both signs."),
        (["{model}", "--over", "group", "--size", "0"], "size"),
        (
            ["{model}", "--fit", "percentile", "--percentile", "9"],
            "percentile=9.0 must be above 50",
        ),
        (["{model}", "--percentile", "99"], "--percentile is for --fit percentile: add that"),
        (["{model}", "--size", "32"], "--size is for --over group or --over block: add that"),
        (["{model}", "--tokens", "9"], "--tokens is for --text FILE: add that, or leave it out."),
        (["{model}", "--step", "3"], "There is no step 3 in"),
        (["{model}", "--text", "{empty}"], "empty.txt has 0 tokens: give 2 or more."),
        (["{model}", "--text", "{empty}", "--tokens", "1"], "--tokens 1 must be 2 or more"),
        (
            ["{model}", "--text", "{empty}", "--formats", "INT8:asymmetric"],
            "symmetric integers up to INT11, not INT8:asymmetric.",
        ),
    ],
)
def test_an_error_that_a_user_can_fix_is_one_line(theirs, tmp_path, capsys, arguments, message):
    empty = tmp_path / "empty.txt"
    empty.touch()
    given = [argument.format(model=theirs, empty=empty) for argument in arguments]
    assert cli.main(["formats", *given]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said


def test_numbers_that_are_none_are_reported(tmp_path, capsys):
    broken = filled(CONFIG)
    broken.layers[0].mlp.up[...] = broken.layers[0].mlp.up[...].at[3, 4].set(jnp.nan)
    hf.save(tmp_path / "model", broken)
    assert cli.main(["formats", str(tmp_path / "model"), *FEW]) == 2
    assert "layers.0.mlp.up has a NaN or an infinity" in capsys.readouterr().err
