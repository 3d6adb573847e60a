"""`coat formats`: its numbers are the quantizer's and telemetry's, from whatever folder."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from cli_cases import save_run, write_config, write_words
from small_model import filled

from coat_jax import cli, models
from coat_jax.models import hf
from coat_jax.numerics.quantizer import Quantizer
from coat_jax.training.checkpoint import weights
from coat_jax.training.report import best_formats

# Few shapes: a program is compiled for each shape and format.
CONFIG = models.Config(
    vocab=256,
    width=32,
    layers=1,
    heads=2,
    kv_heads=2,
    head_dim=16,
    ffn=32,
    context=16,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    precision="bf16",
    scan=False,
)
FEW = ["--formats", "INT8", "E5M2", "--fit", "max"]
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
    lines = map(str.split, asked(capsys, theirs, *FEW).splitlines()[1 : MATRICES + 1])
    rows = {tensor: (float(int8), best) for tensor, int8, _, best in lines}
    assert len(rows) == MATRICES
    gate, embed = MODEL.layers[0].mlp.gate, MODEL.embed
    for tensor, one, inputs in (("layers.0.mlp.gate", gate, 0), ("embed", embed, 1)):
        x = np.asarray(one[...])
        scale = abs(x).max(inputs, keepdims=True) / 127
        error = np.round(x / scale) * scale - x
        bits = np.log2(np.linalg.norm(x) / np.linalg.norm(error))
        assert rows[tensor] == (pytest.approx(bits, abs=0.006), "INT8")  # of normal numbers


@pytest.mark.costly
@pytest.mark.parametrize(("name", "most"), [("INT8", 8), ("E5M2", 5)])
def test_a_text_shows_the_error_of_each_tensor_in_training(theirs, tmp_path, capsys, name, most):
    text = tmp_path / "text.txt"
    text.write_text("def main():\n    return 'a text of some length'\n")
    out = asked(capsys, theirs, "--formats", name, "--fit", "max", "--text", text)
    lines = out.partition("in training")[2].splitlines()[1:-3]
    rows = {tensor: float(bits) for tensor, bits, _ in map(str.split, lines)}
    assert {"layers/0/attention/input", "layers/0/mlp/down/gradient"} <= rows.keys()
    assert all(1.5 < bits < most for bits in rows.values())


def test_a_run_and_a_hugging_face_folder_say_the_same(theirs, tmp_path, capsys):
    run = save_run(tmp_path / "run", MODEL)
    one, other = (asked(capsys, f, *FEW, "--over", "tensor") for f in (theirs, run))
    assert one == other
    lines = one.splitlines()
    assert lines[0].split() == ["weights", "INT8", "E5M2", "best"]
    assert len(lines) == 1 + MATRICES + 3
    assert f"best: INT8 for {MATRICES} of {MATRICES}; mean bits: INT8 6.9" in lines[-2]


@pytest.mark.parametrize("over", ["channel", "group"])
def test_a_sample_has_whole_channels_or_rows(theirs, monkeypatch, over):
    seen = []
    monkeypatch.setattr(best_formats, "_bits", lambda quantizer, x: seen.append(x) or 1.0)
    parameters = hf.read(theirs, weights.model_config(theirs))
    monkeypatch.setattr(best_formats, "SAMPLE", 3 * 32)
    rows = best_formats.weights(parameters, [Quantizer("INT8", over)])
    (x,) = (x for row, x in zip(rows, seen, strict=False) if row.tensor == "layers.0.mlp.gate")
    gate = np.asarray(MODEL.layers[0].mlp.gate[...])
    np.testing.assert_array_equal(x, (gate.T if over == "channel" else gate)[::10])


def test_a_text_is_read_with_the_tokenizer_that_the_run_was_trained_with(
    tmp_path, capsys, monkeypatch
):
    read, row = [], best_formats.Row("x", {"INT8": 1.0})
    monkeypatch.setattr(best_formats, "in_training", lambda *given: read.append(given[-1]) or [row])
    run, text = save_run(tmp_path / "run", MODEL), tmp_path / "text.txt"
    text.write_text("yes")
    elsewhere = write_words(tmp_path / "words.json", "yes", "no")
    write_config(run, CONFIG, data={"tokenizer": str(elsewhere)})
    assert cli.main(["formats", str(run), *FEW, "--text", str(text)]) == 2
    assert "text.txt has 1 token: give 2 or more" in capsys.readouterr().err
    asked(capsys, run, *FEW, "--text", text, "--tokenizer", "bytes")
    assert [list(tokens) for tokens in read] == [list(b"yes")]


def test_values_of_the_format_are_right_to_all_bits():
    bits = functools.partial(best_formats._bits, Quantizer("INT8"))
    for value in (1.5, 0.0):
        assert bits(np.full((4, 4), value, np.float32)) == best_formats.EXACT == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("NOWHERE", "NOWHERE is neither the folder of a run nor one of Hugging Face"),
        ("MODEL --formats FP4", "'FP4' does not name a small float: write E and M"),
        ("MODEL --over group --size 0", "size"),
        ("MODEL --fit percentile --percentile 9", "percentile=9.0 must be a number above 50"),
        ("MODEL --tokens 9", "--tokens is for --text FILE: leave it out."),
        ("MODEL --step 3", "There is no step 3 in"),
        ("MODEL --text EMPTY", "empty.txt has 0 tokens: give 2 or more."),
        ("MODEL --text EMPTY --tokens 0", "--tokens: 0 must be 1 or more"),
        ("BROKEN --formats INT8 --fit max", "layers.0.mlp.up has a NaN or an infinity"),
    ],
)
def test_an_error_that_a_user_can_fix_is_one_line(theirs, tmp_path, capsys, arguments, message):
    folders = {"MODEL": theirs, "EMPTY": tmp_path / "empty.txt", "BROKEN": tmp_path / "broken"}
    folders["EMPTY"].touch()
    if "BROKEN" in arguments:
        broken = filled(CONFIG)
        broken.layers[0].mlp.up[...] = broken.layers[0].mlp.up[...].at[3, 4].set(jnp.nan)
        hf.save(folders["BROKEN"], broken)
    given = [str(folders.get(word, word)) for word in arguments.split()]
    assert cli.main(["formats", *given]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
