"""`coat convert --to`: what it makes is what the library makes, runs, and is not taken for more."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_cases import save_run, write_config, write_words
from flax import nnx
from small_model import SMALL, filled

from coat_jax import quantization as q
from coat_jax.cli import main
from coat_jax.models import hf
from coat_jax.tokenizers import Tokenizer
from coat_jax.training.checkpoint import conversion, weights
from coat_jax.training.setup import require_same_model

CONFIG = dataclasses.replace(SMALL, layers=1, dtype=jnp.float32, param_dtype=jnp.float32)
WORDS = "[unk]", "The", "calibration", "text", "of", "a", "test"
TEXT = "The calibration text of a test. " * 40


@pytest.fixture(scope="module")
def model():
    return filled(CONFIG)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("theirs")
    hf.save(folder, model, extra={"eos_token_id": 7})
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    return folder


@pytest.fixture(scope="module")
def in_int8(tmp_path_factory, theirs):
    """The folder as `coat convert --to int8` makes it."""
    folder = tmp_path_factory.mktemp("made") / "int8"
    assert convert(theirs, folder, "--to", "int8") == 0
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def rows_of(tokens):
    """As many rows of the context's length as they fill."""
    return np.array(tokens[: len(tokens) // 64 * 64], np.int32).reshape(-1, 64)


def convert(*arguments):
    return main(["convert", *map(str, arguments)])


def assert_same(folder, expected):
    got, wanted = (dict(nnx.to_flat_state(nnx.state(m))) for m in (q.load(folder), expected))
    assert got.keys() == wanted.keys()
    for path, leaf in wanted.items():
        ours, theirs = np.asarray(got[path][...]), np.asarray(leaf[...])
        if path[-1] == "input_scale":  # from sums in another order
            np.testing.assert_allclose(ours, theirs, rtol=1e-4)
        else:
            assert ours.tobytes() == theirs.tobytes(), path


def test_it_is_what_the_library_makes(theirs, in_int8, text, model, tmp_path):
    """By default dynamic; with a text static, whose tokens are bytes here."""
    assert_same(in_int8, q.quantize(model, q.Recipe()))
    static = ["--activations", "static", "--activation-fit", "max", "--calibrate", text]
    rest = ["--fit", "percentile", "--percentile", "99", "--tokens", "640", "--leave", "*.down"]
    assert convert(theirs, tmp_path / "b", "--to", "fp8", *static, *rest) == 0
    recipe = q.Recipe(
        format="fp8",
        fit="percentile",
        activations="static",
        activation_fit="max",
        percentile=99.0,
        leave=("*.down",),
    )
    rows = rows_of([*TEXT.encode()[:640]])
    assert_same(tmp_path / "b", q.quantize(model, recipe, q.calibrate(model, [rows], recipe)))
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == 7
    assert (tmp_path / "b" / "tokenizer_config.json").read_text() == '{"a": 1}'


def test_a_model_may_be_balanced_before(theirs, text, model, tmp_path):
    """And its ranges are those that it has then. Without 8 bits, too, and again."""
    rows = rows_of([*TEXT.encode()])
    balanced = q.balance(model, [rows])
    static = ["--to", "int8", "--activations", "static", "--calibrate", text, "--balance", text]
    assert convert(theirs, tmp_path / "a", *static) == 0
    recipe = q.Recipe(activations="static")
    ranges = q.calibrate(balanced, [rows], recipe)
    assert_same(tmp_path / "a", q.quantize(balanced, recipe, ranges))

    assert convert(theirs, tmp_path / "b", "--balance", text) == 0
    assert convert(tmp_path / "b", tmp_path / "again", "--balance", text) == 0
    for folder, expected in (("b", balanced), ("again", q.balance(balanced, [rows]))):
        loaded = weights.load(tmp_path / folder, CONFIG)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(expected))


@pytest.mark.parametrize(("count", "context"), [(1000, 64), (7, 64), (5000, 4096), (0, 64)])
def test_a_text_is_read_in_rows_of_one_length_that_leave_out_few_tokens(count, context):
    batches = list(conversion._batches(range(count), context))
    assert len({batch.shape[1] for batch in batches}) <= 1
    rows = [row for batch in batches for row in batch]
    read = np.ravel(rows).tolist()
    assert read == list(range(len(read)))
    assert count - len(read) <= len(rows)
    assert all(len(row) <= min(context, conversion.LONGEST) for row in rows)


def test_a_run_is_quantized_from_the_step_that_is_asked_for(model, tmp_path, text):
    """With the tokenizer in its folder; and the run was in FP8."""
    run, config = tmp_path / "run", dataclasses.replace(CONFIG, precision="coat")
    save_run(run, model, filled(CONFIG, seed=1))
    write_config(run, config, data={})
    write_words(run / "tokenizer.json", *WORDS)
    mixed = ["--to", "mixed", "--calibrate", text]
    assert convert(run, tmp_path / "out", *mixed, "--step", 1) == 0
    recipe, rows = q.Recipe(format="mixed"), rows_of(Tokenizer(run / "tokenizer.json").encode(TEXT))
    assert len(rows) > 2
    assert_same(tmp_path / "out", q.quantize(model, recipe, q.calibrate(model, [rows], recipe)))
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_coat_generate_runs_it(in_int8, capsys):
    greedy = ["--prompt", "def ", "--temperature", "0", "--max-tokens", "4"]
    assert main(["generate", str(in_int8), *greedy]) == 0
    alone = capsys.readouterr().out
    assert alone.startswith("def ")
    assert main(["generate", str(in_int8), *greedy, "--devices", "2"]) == 0
    assert capsys.readouterr().out == alone
    assert main(["generate", str(in_int8), *greedy, "--precision", "coat"]) == 2
    assert "is already quantized, which decides its precision" in capsys.readouterr().err


def test_int4_weights_and_an_int8_cache_together(text, tmp_path, capsys):
    model = filled(dataclasses.replace(CONFIG, width=128, heads=8))
    hf.save(tmp_path / "theirs", model)
    calibrated = ["--calibrate", text, "--tokens", "512"]
    assert convert(tmp_path / "theirs", tmp_path / "w4a8", "--to", "w4a8", *calibrated) == 0
    assert "linear layers: 7 in INT4" in capsys.readouterr().out
    recipe = q.Recipe(format="int4")
    ranges = q.calibrate(model, [rows_of([*TEXT.encode()[:512]])], recipe)
    assert_same(tmp_path / "w4a8", q.quantize(model, recipe, ranges))
    greedy = ["--prompt", "def ", "--temperature", "0", "--max-tokens", "4", "--cache", "int8"]
    assert main(["generate", str(tmp_path / "w4a8"), *greedy]) == 0
    assert capsys.readouterr().out.startswith("def ")


# --- Refusals --------------------------------------------------------------------------------


def refused(capsys, *arguments):
    assert main(list(map(str, arguments))) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_quantized_model_is_not_converted_compared_or_trained(in_int8, tmp_path, capsys):
    again = tmp_path / "again"
    convert = ["convert", in_int8, again]
    for command in ([*convert, "--to", "fp8"], convert, ["formats", in_int8]):
        assert f"{in_int8} is already quantized" in refused(capsys, *command)
    assert not again.exists()
    with pytest.raises(ValueError, match=r"already quantized\. Training needs the original"):
        require_same_model(str(in_int8), CONFIG)


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(
    theirs, text, tmp_path, capsys, monkeypatch
):
    def calibrate(*arguments):
        raise AssertionError("the work has begun")

    monkeypatch.setattr(q, "calibrate", calibrate)
    static = ["--to", "int8", "--activations", "static", "--calibrate", text]
    for options in (static, ["--to", "int8", "--balance", text], ["--balance", text]):
        assert "text.txt" in refused(capsys, "convert", theirs, text / "out", *options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--fit", "max"], "--fit is for --to int8, fp8, mixed:"),
        (["--to", "int8", "--calibrate", "TEXT"], "--calibrate is for --activations static"),
        (["--to", "int8", "--tokens", "9"], "--tokens is for --calibrate and --balance"),
        (["--to", "w4a8", "--fit", "max"], "--fit is for --to int8, fp8, mixed:"),
        (["--to", "w4a8"], "'*.gate' (64), '*.key' (64)"),
        (["--balance", "TEXT", "--dtype", "float16"], "in float16 cannot be balanced"),
        (["--balance", "TEXT", "--tokens", "0"], "--tokens: 0 must be 1 or more"),
        (
            ["--to", "mixed", "--activations", "none", "--calibrate", "TEXT"],
            "--calibrate is for --activations static",
        ),
        (["--to", "int8", "--activations", "static"], "needs a text to see activations on"),
        (
            ["--to", "mixed", "--calibrate", "EMPTY"],
            "The text of --calibrate, EMPTY, has no tokens",
        ),
        (["--to", "mixed", "--calibrate", "nowhere.txt"], "There is no file nowhere.txt"),
        (["--to", "int8", "--percentile", "20"], "percentile=20.0"),
        (["--to", "int8", "--percentile", "99"], "--percentile is for --fit percentile and"),
        (["--to", "int8", "--activation-fit", "max"], "--activation-fit is for --activations st"),
        (["--to", "int8", "--leave", "*.dwn"], "leave='*.dwn' matches no projection"),
        (["--to", "int8", "--step", "1"], "There is no step 1 in"),
    ],
)
def test_options_that_do_not_fit(options, named, theirs, text, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    files = {"TEXT": str(text), "EMPTY": str(tmp_path / "empty.txt")}
    for name, path in files.items():
        named = named.replace(name, path)
    options = [files.get(option, option) for option in options]
    assert named in refused(capsys, "convert", theirs, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_tokenizer_may_be_given_one(text, tmp_path, capsys):
    """A model of 259 tokens, which are not bytes. Both copies have what was given."""
    folder, words = tmp_path / "theirs", tmp_path / "words.json"
    hf.save(folder, filled(dataclasses.replace(CONFIG, vocab=259)))
    write_words(words, *WORDS)
    static = ["--to", "fp8", "--fit", "max", "--activations", "static", "--calibrate", text]
    said = refused(capsys, "convert", folder, tmp_path / "no", *static)
    assert "Name its tokenizer with --tokenizer FILE; or --tokenizer bytes" in said
    for name, options in (("a", static), ("b", [])):
        assert convert(folder, tmp_path / name, *options, "--tokenizer", words) == 0
        assert (tmp_path / name / "tokenizer.json").read_bytes() == words.read_bytes()
    assert convert(folder, tmp_path / "c", *static, "--tokenizer", "bytes") == 0
    assert not (tmp_path / "c" / "tokenizer.json").exists()


@pytest.mark.parametrize(("tokens", "said"), [(1, "sees 1 token only"), (600, "")])
def test_few_tokens_are_noted(tokens, said, theirs, text, tmp_path, capsys):
    assert convert(theirs, tmp_path / "out", "--balance", text, "--tokens", tokens) == 0
    err = capsys.readouterr().err
    assert said in err if said else "only" not in err


@pytest.mark.parametrize("to", [[], ["--to", "int8"]])
@pytest.mark.parametrize("name", ["embed", "layers.mlp.up"])
def test_parameters_that_are_not_finite_leave_no_folder(name, to, model, tmp_path, capsys):
    folder = tmp_path / "lost"
    lost = jax.tree.map(lambda x: x, nnx.clone(model))
    parameter = lost.embed if name == "embed" else lost.layers.mlp.up
    parameter[...] = parameter[...].at[0, 0].set(jnp.nan)
    hf.save(folder, lost)
    said = refused(capsys, "convert", folder, tmp_path / "out", *to)
    assert f"{name} has a NaN or an infinity" in said.replace("layers.0", "layers")
    assert {path.name for path in tmp_path.iterdir()} == {"lost"}
