"""What the command line says reaches the field that is meant, as what its annotation says."""

import dataclasses

import jax.numpy as jnp
import pytest
from train_cases import SMALL, small

import coat_jax as coat
from coat_jax.ops import Llama3Scaling, Rotary
from coat_jax.training.overrides import explain, fields, load_config, override, source


def changed(*arguments):
    """The fields that differ from SMALL's after these arguments."""
    after = {f.name: f.value for f in fields(override(SMALL, arguments)) if not f.group}
    before = {f.name: f.value for f in fields(SMALL) if not f.group}
    return {name: value for name, value in after.items() if before.get(name) != value}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--steps", "30"], {"steps": 30}),
        (["--steps=30"], {"steps": 30}),
        (["--optimizer.peak", "1e-4"], {"optimizer.peak": 1e-4}),
        (["--peak", "1", "--b1", "0.8"], {"optimizer.peak": 1.0, "optimizer.b1": 0.8}),
        (["--schedule", "wsd"], {"optimizer.schedule": "wsd"}),
        (["--log-every", "5"], {"log_every": 5}),
        (["--clip", "none"], {"optimizer.clip": None}),
        (["--decay_vectors", "true"], {"optimizer.decay_vectors": True}),
        (["--mesh.fsdp", "-1"], {"mesh.fsdp": -1}),
        (["--fsdp=-1"], {"mesh.fsdp": -1}),
        (["--param_dtype", "bfloat16"], {"model.param_dtype": jnp.dtype("bfloat16")}),
        (["--remat", "layer_fp8"], {"model.remat": "layer_fp8"}),
        (["--scan", "false"], {"model.scan": False}),
        (["--theta", "5e5"], {"model.rotary.theta": 5e5}),
        (["--model.rotary.scaling", "2"], {"model.rotary.scaling": 2.0}),
        (["--data.train", "a.npy", "b.npy"], {"data.train": ("a.npy", "b.npy")}),
        (["--writers"], {}),
        (["--writers", "wandb", "tensorboard"], {"writers": ("wandb", "tensorboard")}),
        (["--init_from", "folder"], {"init_from": "folder"}),
        (["--tokenizer", "None"], {}),
    ],
)
def test_a_value_reaches_its_field(arguments, wanted):
    assert changed(*arguments) == wanted


def test_a_precision_has_a_name_and_fields():
    assert override(SMALL, ["--precision", "coat"]).model.precision == coat.COAT
    config = override(SMALL, ["--model.precision.block", "32", "--precision", "coat_lean"])
    assert config.model.precision == dataclasses.replace(coat.COAT_LEAN, block=32)


def test_fields_are_checked_together():
    """One by one, either of these would be refused."""
    config = override(SMALL, ["--batch", "12", "--accumulation", "3"])
    assert config.microbatch == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stepz", "3"], "There is no field 'stepz'. Did you mean --steps?"),
        (["--optimizer.peek", "3"], "no field 'optimizer.peek'. Did you mean --optimizer.peak?"),
        (["--qqq", "3"], "There is no field 'qqq'. --help lists them all"),
        (["--model.axes", "x"], "There is no field 'model.axes'"),
        (["--every", "3"], "--every may be any of --evaluation.every, --checkpoint.every"),
        (["--optimizer", "adamw"], "--optimizer is a group of fields: --optimizer.name"),
        (["--rotary", "1"], "--rotary is a group of fields: --model.rotary.theta"),
        (["steps", "3"], "'steps' belongs to no field: write --field value"),
        (["--steps"], r"--steps takes one value \(a whole number\), not nothing"),
        (["--steps", "3", "4"], r"--steps takes one value \(a whole number\), not '3 4'"),
        (["--steps", "3.5"], "--steps '3.5' is not a whole number"),
        (["--peak", "high"], "--optimizer.peak 'high' is not a number"),
        (["--scan", "maybe"], "--model.scan 'maybe' is not true or false"),
        (["--schedule", "step"], "--optimizer.schedule 'step' is not cosine or linear or wsd"),
        (["--precision", "fp7"], "--model.precision 'fp7' is not bf16 or fp8_linear or coat or"),
        (["--param_dtype", "float9"], "--model.param_dtype 'float9' is not a dtype"),
        (["--writers", "excel"], "--writers 'excel' is not .*tensorboard or wandb"),
        (["--steps", "0"], "steps=0 must be a whole number from 1 to"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        override(SMALL, arguments)


def test_help_explains_every_field_with_its_value():
    text = explain(SMALL)
    for field in fields(SMALL):
        assert field.sentence, field.name
        if not field.group:
            assert f"\n  --{field.name} " in text
    assert "--optimizer.peak 0.003    (a number)\n        the highest learning rate." in text
    assert "--model.precision bf16    (bf16 or fp8_linear or coat or coat_lean or coat_" in text
    assert "--model.precision.exact_forward false    (true or false)" in text
    assert "--model.precision.block none    (a whole number or none)" in text
    assert "model: what is trained.\n  --model.vocab 256" in text
    assert "--model.vocab    (a whole number)" in explain()


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        small(
            model={
                "precision": dataclasses.replace(coat.COAT, block=64),
                "param_dtype": "bfloat16",
            },
            writers=("wandb",),
            out="it's",
        ),
        small(model={"rotary": Rotary(5e5, Llama3Scaling(4.0)), "window": 8, "precision": "coat"}),
    ],
)
def test_a_printed_config_makes_the_same_config(config, tmp_path):
    path = tmp_path / "printed.py"
    path.write_text(source(config))
    assert load_config(str(path)) == config


def write(tmp_path, text):
    path = tmp_path / "some.py"
    path.write_text(text)
    return path


MAKES = "from train_cases import small\n\ndef config():\n    return small()\n"


def test_a_file_may_have_several_configs(tmp_path):
    path = write(tmp_path, MAKES + "\ndef other():\n    return small(steps=7)\n")
    assert load_config(str(path)) == SMALL
    assert load_config(f"{path}:other").steps == 7


@pytest.mark.parametrize(
    ("text", "function", "error", "message"),
    [
        (MAKES, "bf17", ValueError, r"has no function bf17\(\) .* Its functions are .*config"),
        ("x = 1\n", "config", ValueError, r"no function config\(\) .* functions are none"),
        ("def config():\n    return 3\n", "config", ValueError, "that returns a TrainConfig"),
        ("def config():\n    return 1 / 0\n", "config", ValueError, "some.py:2: ZeroDivisionError"),
        ("def config(:\n", "config", ValueError, "some.py.*SyntaxError"),
        ("import nothing_there\n", "config", ValueError, "some.py:1: ModuleNotFoundError"),
    ],
)
def test_a_file_that_makes_no_config_is_refused(tmp_path, text, function, error, message):
    with pytest.raises(error, match=message):
        load_config(f"{write(tmp_path, text)}:{function}")


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(FileNotFoundError, match=r"There is no config file missing\.py"):
        load_config("missing.py")
