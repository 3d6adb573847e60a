"""A run goes on with what does not change its parameters or its data, and says what changed."""

import dataclasses
import json
import re

import jax.numpy as jnp
import optax
import pytest
from train_cases import SMALL, small

from coat_jax import limits, models
from coat_jax.errors import UserError
from coat_jax.ops import Llama3Scaling, Rotary
from coat_jax.training.resume_rules import RENAMED, changes, to_json


def lion(schedule):
    return optax.lion(schedule)


def saved(config):
    return json.loads(json.dumps(to_json(config)))


def test_what_does_not_matter_is_not_reported():
    """The folder, the cache, what is measured."""
    assert changes(SMALL, saved(SMALL)) == []
    other = small(out="elsewhere", cache="there", metrics={"norm": lion})
    assert changes(other, saved(SMALL)) == []
    assert saved(other)["metrics"]["norm"].endswith("lion")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"total_steps": 20}, "total_steps was 10, now 20"),
        ({"model": {"remat": "layer"}}, "model.remat was None, now 'layer'"),
        ({"model": {"precision": "fp8_linear"}}, "model.precision.fp8_linear was False, now True"),
        ({"optimizer": {"learning_rate": 1.0}}, "optimizer.learning_rate was 0.003, now 1.0"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps was 1, now 2"),
    ],
)
def test_allowed_changes_are_reported(changed, line):
    assert line in changes(small(**changed), saved(SMALL))


OTHER_DATA = dataclasses.replace(SMALL.data, train=("a.npy",))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"model": {"ffn": 256}}, "model.ffn was 128, now 256"),
        ({"model": {"scan": False}}, "model.scan was True, now False"),
        ({"model": {"param_dtype": jnp.bfloat16}}, "model.param_dtype was 'float32', now 'bfl"),
        ({"optimizer": {"name": "adamw"}}, "optimizer.name was 'fp8_adamw', now 'adamw'"),
        ({"data": OTHER_DATA}, r"data.train was \['.*/training.md'\], now \['a.npy'\]"),
        ({"global_batch_size": 8}, "global_batch_size was 16, now 8"),
        ({"seed": 1}, "seed was 0, now 1"),
    ],
)
def test_another_run_is_refused(changed, line):
    with pytest.raises(ValueError, match=f"holds another run: {line}.*--out.*--resume false"):
        changes(small(**changed), saved(SMALL))


def test_what_a_run_began_from_cannot_change_once_there_is_a_checkpoint():
    """Its parameters are then those of the checkpoint."""
    other = small(init_from="elsewhere")
    with pytest.raises(ValueError, match=r"another run: init_from was None, now .*elsewhere"):
        changes(other, saved(SMALL))
    (line,) = changes(other, saved(SMALL), begun=False)
    assert line.startswith("init_from was None, now ")


@pytest.mark.parametrize("name", ["correct_params", "release_gradients"])
def test_a_run_goes_on_as_it_began(name):
    """Checkpoints have corrections, or the norm of the last gradients, or they do not."""
    model = {"param_dtype": jnp.bfloat16, "scan": False}
    with_it, without = (small(model=model, optimizer={name: value}) for value in (True, False))
    for now, before, named in ((with_it, without, "false"), (without, with_it, "true")):
        with pytest.raises(UserError, match=f"as it began, with --optimizer.{name} {named};"):
            changes(now, saved(before))
    of_earlier_version = saved(without)
    del of_earlier_version["optimizer"][name]
    assert changes(without, of_earlier_version) == []


OLD_NAMES = {new: old for old, new in RENAMED.items()}


def old(config, moments):
    """What an earlier version wrote of a config."""

    def renamed(tree, prefix):
        return {
            OLD_NAMES.get(prefix + name, name).rpartition(".")[2]: value
            for name, value in tree.items()
        }

    now = saved(config)
    now["optimizer"] = renamed(now["optimizer"], "optimizer.")
    if moments is None:
        del now["optimizer"]["moments"]
    else:
        now["optimizer"]["moments"] = moments
    return renamed(now, "")


@pytest.mark.parametrize("moments", [None, "expanded", "paper"])
def test_a_run_of_an_earlier_version_continues_with_its_moments(moments):
    """Or says how to go on."""
    names, meant = old(SMALL, moments), moments or "expanded"
    assert {"steps", "batch", "sequence", "accumulation"} <= names.keys()
    assert {"peak", "warmup", "cooldown", "final", "clip"} <= names["optimizer"].keys()
    assert changes(small(optimizer={"moments": meant}), names) == []
    with pytest.raises(UserError, match=f"with --optimizer.moments {meant}; or begin from"):
        changes(SMALL, names)
    with pytest.raises(UserError, match=r"with --optimizer\.moments directions; or begin from"):
        changes(small(optimizer={"moments": meant}), saved(SMALL))


def test_a_named_optimizer_and_a_transformation_are_other_runs():
    """Another transformation is reported: it may be the same under another name."""
    before = dataclasses.replace(SMALL, optimizer=lion)
    assert changes(before, saved(before)) == []
    with pytest.raises(UserError, match=r"optimizer\.transformation was None, now '.*lion'"):
        changes(before, saved(SMALL))
    with pytest.raises(UserError, match=r"optimizer\.transformation was '.*lion', now None"):
        changes(SMALL, saved(before))
    (line,) = changes(dataclasses.replace(SMALL, optimizer=optax.adan), saved(before))
    assert re.fullmatch("optimizer.transformation was '.*lion', now '.*adan'", line)
    (line,) = changes(before, old(before, None))
    assert line == "optimizer.moments was 'expanded', now 'directions'"


def test_the_rounding_of_moments_may_change():
    before = small(optimizer={"moments": "expanded"})
    line = "optimizer.moments was 'expanded', now 'paper'"
    assert changes(small(optimizer={"moments": "paper"}), saved(before)) == [line]


def test_formats_of_moments_that_are_not_used_do_not_matter():
    before = small(optimizer={"name": "adamw", "moments": "expanded"})
    assert changes(small(optimizer={"name": "adamw"}), old(before, None)) == []
    assert len(changes(small(optimizer={"name": "adamw"}), saved(before))) == 1


SMALL_MODELS = [
    {},
    {"precision": "coat_lean", "param_dtype": jnp.bfloat16, "qk_norm": "head"},
    {"rotary": Rotary(5e5, Llama3Scaling(factor=2.0)), "window": 8},
    {"rotary": Rotary(5e5, 2.0)},
]


def test_a_model_is_read_back_from_json():
    for config in map(small, SMALL_MODELS):
        assert limits.from_json(models.Config, saved(config)["model"], "model") == config.model


def test_a_model_of_before_a_field_existed_means_what_was_done_then():
    """A field that was always there is missed."""
    model = saved(small(model={"precision": "coat"}))["model"]
    del model["precision"]["stochastic"], model["precision"]["stochastic_backward"]
    precision = limits.from_json(models.Config, model, "model").precision
    assert not precision.stochastic
    assert not precision.stochastic_backward
    del model["precision"]["block"]
    with pytest.raises(UserError, match=r"model\.precision lacks block: it is damaged"):
        limits.from_json(models.Config, model, "model")
    model["precision"] |= {"block": 16, "stochastic": "perhaps"}
    with pytest.raises(UserError, match=r"^model\.precision: stochastic='perhaps' must be"):
        limits.from_json(models.Config, model, "model")


def test_a_field_that_an_earlier_version_lacked_was_what_that_version_did():
    before = saved(SMALL)
    del before["model"]["precision"]["stochastic"]
    assert changes(small(model={"precision": "coat_paper"}), before)
    coat = small(model={"precision": "coat"})
    before = saved(coat)
    precision = before["model"]["precision"]
    del precision["stochastic"], precision["stochastic_backward"]
    assert changes(coat, before) == ["model.precision.stochastic was False, now True"]
