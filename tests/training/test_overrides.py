"""What the command line says reaches the field that is meant, as what its annotation says."""

import dataclasses
import re

import jax.numpy as jnp
import optax
import pytest
from train_cases import SMALL, small

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.ops import Llama3Scaling, Rotary
from coat_jax.training.config import CheckpointConfig, EvaluationConfig, MeshConfig
from coat_jax.training.config_files import load_config, source
from coat_jax.training.overrides import SYNONYM_OF, explain, fields, override


def changed(line):
    """The fields that differ from SMALL's after these arguments."""
    after = {f.name: f.value for f in fields(override(SMALL, line.split())) if not f.group}
    before = {f.name: f.value for f in fields(SMALL) if not f.group}
    return {name: value for name, value in after.items() if before.get(name) != value}


LIKE_OTHERS = {"optimizer.learning_rate": 1, "optimizer.weight_decay": 1, "total_steps": 30}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("--total_steps 30", {"total_steps": 30}),
        ("--total-steps=30", {"total_steps": 30}),
        ("--optimizer.learning_rate 1e-4", {"optimizer.learning_rate": 1e-4}),
        ("--learning_rate 1 --b1 0.8", {"optimizer.learning_rate": 1.0, "optimizer.b1": 0.8}),
        ("--warmup_steps 5", {"optimizer.warmup_steps": 5}),
        (
            "--warmup_steps 1e0 --total_steps 2e3",
            {"optimizer.warmup_steps": 1, "total_steps": 2000},
        ),
        ("--lr 1 --wd=1 --max-steps 30", LIKE_OTHERS),
        ("--warmup_steps 0.5", {"optimizer.warmup_steps": 0.5}),
        # Checked together: one by one, either of these would be refused.
        (
            "--global_batch_size 12 --gradient_accumulation_steps 3",
            {"global_batch_size": 12, "gradient_accumulation_steps": 3},
        ),
        ("--schedule wsd", {"optimizer.schedule": "wsd"}),
        ("--clip_norm none", {"optimizer.clip_norm": None}),
        ("--decay_vectors true", {"optimizer.decay_vectors": True}),
        ("--fsdp=-1", {"mesh.fsdp": -1}),
        ("--fsdp 1 --tensor -1", {"mesh.tensor": -1}),
        ("--param_dtype bfloat16", {"model.param_dtype": jnp.dtype("bfloat16")}),
        ("--remat layer_fp8", {"model.remat": "layer_fp8"}),
        ("--scan false", {"model.scan": False}),
        ("--theta 5e5", {"model.rotary.theta": 5e5}),
        ("--model.rotary.scaling 2", {"model.rotary.scaling": 2.0}),
        ("--data.train a.npy b.npy", {"data.train": ("a.npy", "b.npy")}),
        ("--writers --tokenizer None", {}),
        ("--writers wandb tensorboard", {"writers": ("wandb", "tensorboard")}),
        ("--init_from folder", {"init_from": "folder"}),
    ],
)
def test_a_value_reaches_its_field(line, wanted):
    assert changed(line) == wanted


def test_a_precision_has_a_name_and_fields():
    config = override(SMALL, ["--model.precision.block", "32", "--precision", "coat_lean"])
    assert config.model.precision == dataclasses.replace(coat.COAT_LEAN, block=32)


@pytest.mark.parametrize("name", ["E4M3", "e3m4", "E3M4:ieee:bias=8", "float8_e4m3fn"])
def test_a_format_is_named_as_in_code(name):
    config = override(SMALL, ["--precision", "coat", "--model.precision.forward", name])
    assert config.model.precision == dataclasses.replace(coat.COAT, forward=name)
    shown = getattr(config.model.precision.forward, "name", "float8_e4m3fn")
    assert f"  --model.precision.forward {shown}\n" in explain(fields(config))
    names = {}
    exec(source(config), names)
    assert names["config"]() == config
    with pytest.raises(UserError, match="There is no field 'bias'"):
        override(config, ["--bias", "3"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--total_stepz 3", "There is no field 'total_stepz'. Did you mean --total_steps?"),
        ("--optimizer.clip_nrom 3", "'optimizer.clip_nrom'. Did you mean --optimizer.clip_norm?"),
        ("--learning_rte 1", r"There is no field .* Did you mean --optimizer.learning_rate\?"),
        ("--qqq 3", "There is no field 'qqq'. --help-all lists them all"),
        ("--model.axes x", "There is no field 'model.axes'"),
        ("--every 3", "--every may mean any of --evaluation.every, --checkpoint.every"),
        ("--optimizer adamw", "optimizer='adamw' must be an OptimizerConfig"),
        ("--rotary 1", "rotary='1' must be a Rotary"),
        ("--optimizer.transformation x", "transformation='x' is neither an optax transformation"),
        ("--metrics x", "metrics='x' must be a dict"),
        ("total_steps 3", "'total_steps' follows no --field: write --field value"),
        ("--total_steps", "--total_steps needs a value: write --field value"),
        ("--total_steps 3 4", "'4' follows no --field"),
        ("--total_steps 3.5", "total_steps=3.5 must be a whole number"),
        ("--learning_rate high", "optimizer.learning_rate='high' must be a number above 0"),
        ("--scan maybe", "scan='maybe' must be True or False"),
        ("--schedule step", "optimizer.schedule='step' must be 'cosine' or 'linear' or 'wsd'"),
        ("--precision fp7", "There is no precision 'fp7'. Use one of bf16, fp8_linear, coat"),
        ("--param_dtype fp16", "param_dtype='fp16' is not a dtype"),
        ("--model.precision.forward E9M9", "forward='E9M9' is not an FP8 format"),
        ("--writers excel", r"writers=\('excel',\) must be a tuple of 'tensorboard' or 'wandb'"),
        # A setting that another one leaves without effect.
        ("--moments paper --optimizer.name adamw", "moments='paper' .*adamw. has them in FP32"),
        ("--decay_steps 0.1 --schedule linear", "decay_steps=0.1 .* not 'linear'"),
    ],
)
def test_bad_overrides_are_refused(line, message):
    with pytest.raises(ValueError, match=message):
        override(SMALL, line.split())


def test_every_alias_names_a_field_and_is_not_one_itself():
    known = {field.name for field in fields(SMALL)}
    assert known.issuperset(SYNONYM_OF.values())
    for alias, field in SYNONYM_OF.items():
        assert not any(name == alias or name.endswith(f".{alias}") for name in known), field


def some_function(schedule):
    return optax.lion(schedule)


def test_functions_are_set_in_the_file_and_named_in_what_is_printed():
    config = small(metrics={"norm": some_function})
    config = dataclasses.replace(config, optimizer=some_function)
    text = explain(fields(config))
    assert re.search("--optimizer.transformation .*some_function\n", text)
    assert "--metrics norm\n" in text
    assert text.count("(a function,") == 2
    printed = source(config)
    assert "transformation=..., # " in printed
    assert "some_function" in printed
    compile(printed, "printed.py", "exec")
    assert override(config, ["--learning_rate", "0.5"]).optimizer.transformation is some_function


def test_help_explains_every_field_with_its_value():
    text = explain(fields(SMALL))
    for field in fields(SMALL):
        assert field.sentence, field.name
        if not field.group:
            assert re.search(rf"\n  --{field.name}[ \n]", text)
    for part in (
        "--optimizer.learning_rate 0.003\n        the highest learning rate, reached",
        "--model.precision bf16\n        what is FP8",
        "whether layers are stacked",
        "model:\n  what is trained.\n",
    ):
        assert part in text
    lines = [line for line in text.splitlines() if not line.startswith("  --")]
    assert max(map(len, lines)) <= 88


COAT_RUN = {"precision": dataclasses.replace(coat.COAT, block=64), "param_dtype": "bfloat16"}
LONG_RUN = {"rotary": Rotary(5e5, Llama3Scaling(4.0)), "window": 8, "precision": "coat"}


@pytest.mark.parametrize(
    "config",
    [SMALL, small(model=COAT_RUN, writers=("wandb",), out="it's"), small(model=LONG_RUN)],
)
def test_a_printed_config_makes_the_same_config(config, tmp_path):
    assert load_config(write(tmp_path, source(config))) == config


def test_a_printed_config_imports_from_the_packages_that_the_docs_name():
    config = small(mesh=MeshConfig(), evaluation=EvaluationConfig(), checkpoint=CheckpointConfig())
    imports = [line for line in source(config).splitlines() if line.startswith("from ")]
    assert imports == [
        "from coat_jax.models import Config",
        "from coat_jax.training.config import OptimizerConfig, TrainConfig",
        "from coat_jax.training.data import DataConfig",
    ]


def write(tmp_path, text):
    path = tmp_path / "some.py"
    path.write_text(text)
    return str(path)


MAKES = "from train_cases import small\n\ndef config():\n    return small()\n"


def test_a_file_may_have_several_configs(tmp_path):
    path = write(tmp_path, MAKES + "\ndef other():\n    return small(total_steps=7)\n")
    assert load_config(path) == SMALL
    assert load_config(f"{path}:other").total_steps == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            MAKES.replace("config", "bf17"),
            r"no function config\(\) .* Its functions are small, bf17:",
        ),
        ("x = 1\n", r"no function config\(\) .* are none: .*--print-config"),
        ("def config():\n    return 3\n", r"no function config\(\) that returns a TrainConfig"),
        ("def config():\n    return 1 / 0\n", "some.py:2: ZeroDivisionError"),
        ("def config():\n    raise SystemExit(3)\n", "some.py:2: SystemExit: 3"),
        ("def config(:\n", "some.py.*SyntaxError"),
        ("import nothing_there\n", "some.py:1: ModuleNotFoundError"),
        (MAKES.replace("small()", "small(steps=3)"), "some.py:4: TypeError: .*argument 'steps'"),
    ],
)
def test_a_file_that_makes_no_config_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load_config(write(tmp_path, text))
    with pytest.raises(FileNotFoundError, match=r"There is no config file 'missing\.py'"):
        load_config("missing.py")
