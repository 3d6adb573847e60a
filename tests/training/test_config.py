"""A config is checked when it is made: each error names the value, the limit and a remedy."""

import dataclasses

import pytest
from train_cases import SMALL, small

from coat_jax.nn import MeshAxes
from coat_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)

PARTS = (TrainConfig, OptimizerConfig, MeshConfig, EvaluationConfig, CheckpointConfig)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0 must be a whole number from 1 to 2,147,483,647"),
        ({"batch": 2.0}, "batch=2.0 must be a whole number"),
        ({"accumulation": True}, "accumulation=True must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number from 0 to 4,294,967,295. The default is 0"),
        ({"z_loss": -0.1}, "z_loss=-0.1 must be a number from 0 to 1"),
        ({"sequence": 65}, "sequence=65 is longer than model.context=64"),
        ({"accumulation": 3}, "batch=16 cannot be cut into accumulation=3 equal parts"),
        (
            {"writers": ("excel",)},
            "must be a tuple of 'tensorboard' or 'wandb'",
        ),
        ({"model": {"axes": MeshAxes("x")}}, "model.axes and model.batch_axes are set from `mesh`"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name='lion' must be 'fp8_adamw' or 'adamw'"),
        ({"optimizer": {"schedule": "step"}}, "optimizer.schedule='step' must be 'cosine' or"),
        (
            {"optimizer": {"peak": -1.0}},
            "peak=-1.0 must be a number above 0 and at most 10",
        ),
        ({"optimizer": {"warmup": 1.5}}, "optimizer.warmup=1.5 must be a number from 0 to 1"),
        ({"optimizer": {"b2": 1.0}}, "optimizer.b2=1.0 must be a number of at least 0 and below 1"),
        ({"optimizer": {"clip": 0.0}}, "clip=0.0 must be a number from 1e-30 to 1e.30 or None"),
        ({"optimizer": {"eps": 0}}, "optimizer.eps=0 must be a number from 1e-30 to 1"),
        (
            {"optimizer": {"schedule": "wsd", "warmup": 0.5, "cooldown": 0.6}},
            "warmup=0.5 and optimizer.cooldown=0.6 are shares .* more than all",
        ),
    ],
)
def test_a_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MeshConfig(data=0), "mesh.data=0 must be 1 or more, or -1"),
        (lambda: MeshConfig(data=-1, fsdp=-1), "Only one can be -1"),
        (lambda: EvaluationConfig(every=-1), "evaluation.every=-1 must be"),
        (lambda: EvaluationConfig(batches=0), "evaluation.batches=0 must be"),
        (lambda: CheckpointConfig(keep=0), "checkpoint.keep=0 must be"),
        (lambda: CheckpointConfig(keep_best=-1), "checkpoint.keep_best=-1 must be"),
    ],
)
def test_its_parts_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_cooldown_counts_for_wsd_only():
    small(optimizer={"schedule": "cosine", "warmup": 0.9})


def test_microbatches_share_the_batch():
    assert dataclasses.replace(SMALL, accumulation=4).microbatch == 4
    assert SMALL.tokens_per_step == 16 * 32


@pytest.mark.parametrize("part", PARTS)
def test_every_field_is_described(part):
    for field in dataclasses.fields(part):
        assert f"    {field.name}: " in part.__doc__, field.name
