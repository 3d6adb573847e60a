"""A config is checked when it is made: each error names the value, the limit and a remedy."""

import dataclasses

import jax.numpy as jnp
import optax
import pytest
from train_cases import SMALL, small

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.training.config import MeshConfig, OptimizerConfig, in_bf16
from coat_jax.training.overrides import override


def lion(schedule):
    return optax.lion(schedule)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_steps": True}, "total_steps=True must be a whole number from 1 to 2,147,483,647"),
        ({"seed": -1}, "seed=-1 must be a whole number from 0 to 4,294,967,295. The default is 0"),
        ({"model": {"z_loss": -0.1}}, "z_loss=-0.1 must be a number from 0 to 1"),
        ({"sequence_length": 65}, "sequence_length=65 is longer than model.context=64"),
        ({"gradient_accumulation_steps": 3}, "=16 cannot be divided into .*_steps=3 equal"),
        ({"writers": ("excel",)}, "must be a tuple of 'tensorboard' or 'wandb'"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name='lion' must be 'fp8_adamw' or 'adamw'"),
        ({"optimizer": {"warmup_steps": 1.5}}, "a whole number .* or a number from 0 to 1"),
        ({"optimizer": {"b2": 1.0}}, "optimizer.b2=1.0 must be a number of at least 0 and below 1"),
        ({"optimizer": {"clip_norm": 0.0}}, "must be a number from 1e-30 to 1e.30 or None"),
        (
            {"optimizer": {"schedule": "wsd", "warmup_steps": 0.5, "decay_steps": 0.6}},
            "warmup_steps=0.5 and optimizer.decay_steps=0.6 take 11 steps, and total_steps=10",
        ),
        ({"optimizer": {"warmup_steps": 11}}, "=11 take 11 steps, and .* Lower .* as in 0.1"),
        ({"out": ""}, "out='' names no folder"),
        (
            {"metrics": {"loss": lion}},
            "metrics={'loss': .* the trainer does not log",
        ),
        ({"metrics": {"fp8/x": lion}}, "metrics={'fp8/x': .* without a slash"),
        ({"metrics": {"norm": 3}}, "metrics={'norm': 3} must be a function of a step"),
        ({"metrics": {3: lion}}, "metrics={3: .*} must be a function"),
        ({"metrics": [lion]}, "metrics=.* must be a dict"),
    ],
)
def test_a_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataclasses.replace(SMALL, model="tiny"), r"model='tiny' must be .*config_of"),
        (lambda: dataclasses.replace(SMALL, optimizer="adamw"), "must be an OptimizerConfig"),
        (lambda: small(mesh=MeshConfig(data=0)), "mesh.data=0 must be a whole number .* or -1"),
    ],
)
def test_its_parts_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("given", [lion, optax.lion(1e-3), coat.optax.compress(optax.lion(1e-3))])
def test_an_optimizer_may_be_a_transformation(given):
    config = dataclasses.replace(SMALL, optimizer=given)
    assert config.optimizer == OptimizerConfig(transformation=given)
    assert in_bf16(config).optimizer == OptimizerConfig(name="adamw")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transformation": 3}, "transformation=3 is neither an optax transformation nor a func"),
        ({"transformation": jnp.bfloat16}, "is neither an optax transformation"),
        ({"transformation": optax.GradientTransformation}, "is neither an optax transformation"),
        ({"transformation": lion, "b2": 0.99}, "b2=0.99 is of the named"),
        ({"transformation": lion, "name": "adamw"}, "name='adamw' is of the named"),
        ({"transformation": lion, "offload": True}, "offload=True steps parameters apart"),
        ({"transformation": lion, "release_gradients": True}, "release_gradients=True steps"),
    ],
)
def test_only_transformations_are_accepted(changes, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**changes)


FOLLOWED = {"learning_rate": 1e-3, "schedule": "wsd", "warmup_steps": 10}


@pytest.mark.parametrize(("name", "value"), (FOLLOWED | {"final_ratio": 0.5}).items())
def test_a_schedule_that_the_transformation_does_not_follow_is_refused(name, value):
    assert OptimizerConfig(transformation=lion, **{name: value})
    with pytest.raises(UserError, match=rf"^optimizer\.{name}={value!r} is of the sched"):
        OptimizerConfig(transformation=optax.lion(1e-3), **{name: value})


def test_decay_steps_count_for_wsd_only_and_shares_may_be_rounded_up():
    small(total_steps=3, optimizer={"schedule": "cosine", "warmup_steps": 0.9})
    small(total_steps=3, optimizer={"schedule": "wsd", "warmup_steps": 0.5, "decay_steps": 0.5})


NUMBERS = ["model.z_loss", "model.norm_eps", "model.rotary.theta", "model.rotary.scaling"]
NUMBERS += ["model.activation_limit"]
NUMBERS += [f"optimizer.{name}" for name in ("learning_rate", "eps", "clip_norm", "weight_decay")]
COUNTS = ["total_steps", "global_batch_size", "sequence_length", "gradient_accumulation_steps"]
COUNTS += ["seed", "log_every", "evaluation.every", "evaluation.batches", "data.end_of_text"]
COUNTS += [f"model.{name}" for name in ("vocab", "width", "layers", "ffn", "window", "context")]
COUNTS += ["model.heads", "model.head_dim", "checkpoint.keep", "checkpoint.keep_best"]


@pytest.mark.parametrize(
    ("name", "kind"), [(n, "number") for n in NUMBERS] + [(n, "whole number") for n in COUNTS]
)
def test_numbers_that_no_run_can_use_are_refused(name, kind):
    values = {"nan", "-1", "1e300", "inf", "-inf", "1e30", "0"}
    if kind == "whole number":
        values = {"nan", "-1", "1e20", "1" + 20 * "0"}
    elif name in ("model.z_loss", "optimizer.weight_decay"):
        values -= {"0"}
    elif name == "optimizer.clip_norm":
        values -= {"1e30"}  # which does not clip
    for value in values:
        with pytest.raises(UserError, match=f"{name.rpartition('.')[2]}.* a {kind}"):
            override(SMALL, [f"--{name}={value}"])


def test_folders_may_be_in_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = small(out="~/x", init_from="~/y")
    assert (config.out, config.init_from) == (f"{tmp_path}/x", f"{tmp_path}/y")
