"""A run goes on with what does not change its parameters or its data, and says what changed."""

import dataclasses
import json
import re

import jax.numpy as jnp
import optax
import pytest
from train_cases import SMALL, small

from coat_jax.errors import UserError
from coat_jax.ops import Llama3Scaling, Rotary
from coat_jax.training import families
from coat_jax.training.config import to_json
from coat_jax.training.resume_rules import changes


def lion(schedule):
    return optax.lion(schedule)


def saved(config):
    return json.loads(json.dumps(to_json(config)))


def test_what_does_not_matter_is_not_reported():
    """The folder, the cache, what is measured."""
    assert changes(SMALL, saved(SMALL), step=2) == []
    other = small(out="elsewhere", cache="there", metrics={"norm": lion})
    assert changes(other, saved(SMALL), step=2) == []
    assert saved(other)["metrics"]["norm"].endswith("lion")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"total_steps": 20}, "total_steps was 10, now 20"),
        ({"model": {"remat": "layer"}}, "model.remat was None, now 'layer'"),
        ({"model": {"activation_limit": 10}}, "model.activation_limit was None, now 10"),
        ({"model": {"precision": "fp8_linear"}}, "model.precision.fp8_linear was False, now True"),
        ({"optimizer": {"learning_rate": 1.0}}, "optimizer.learning_rate was 0.003, now 1.0"),
    ],
)
def test_allowed_changes_are_reported(changed, line):
    assert line in changes(small(**changed), saved(SMALL), step=2)


OTHER_DATA = dataclasses.replace(SMALL.data, train=("a.npy",))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"model": {"ffn": 256}}, "model.ffn was 128, now 256"),
        ({"model": {"scan": False}}, "model.scan was True, now False"),
        ({"model": {"param_dtype": jnp.bfloat16}}, "model.param_dtype was 'float32', now 'bfl"),
        ({"frozen": ("embed",)}, r"frozen was \[\], now \['embed'\]"),
        ({"optimizer": {"moments": "paper"}}, "optimizer.moments was 'directions', now 'paper'"),
        ({"optimizer": {"name": "adamw"}}, "optimizer.name was 'fp8_adamw', now 'adamw'"),
        ({"data": OTHER_DATA}, r"data.train was \['.*/training.md'\], now \['a.npy'\]"),
        ({"global_batch_size": 8}, "global_batch_size was 16, now 8"),
        ({"seed": 1}, "seed was 0, now 1"),
    ],
)
def test_another_run_is_refused(changed, line):
    with pytest.raises(ValueError, match=f"holds another run: {line}.*--out.*--resume false"):
        changes(small(**changed), saved(SMALL), step=2)


def test_another_transformation_is_reported():
    """It may be the same under another name; if not, the arrays of its state are others."""
    before = dataclasses.replace(SMALL, optimizer=lion)
    assert changes(before, saved(before), step=2) == []
    (line,) = changes(dataclasses.replace(SMALL, optimizer=optax.adan), saved(before), step=2)
    assert re.fullmatch("optimizer.transformation was '.*lion', now '.*adan'", line)


def test_a_model_is_read_back_from_json():
    for fields in (
        {"precision": "coat_lean", "param_dtype": jnp.bfloat16, "qk_norm": "head"},
        {"rotary": Rotary(5e5, Llama3Scaling(factor=2.0)), "window": 8},
        {"rotary": Rotary(5e5, 2.0)},
    ):
        config = small(fields)
        assert families.from_json(saved(config)["model"], "model") == config.model


def test_json_that_is_no_model_of_today_is_refused():
    model = saved(SMALL)["model"]
    for changed, said in (
        ({"family": "mamba"}, "family='mamba', and must have llama"),
        ({"precision": {"block": 16}}, "precision lacks .*: it is damaged, or was written by an"),
        ({"scan": "perhaps"}, "scan='perhaps' must be"),
    ):
        with pytest.raises(UserError, match=f"^model.*{said}"):
            families.from_json(model | changed, "model")
