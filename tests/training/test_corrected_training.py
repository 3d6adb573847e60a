"""A run whose BF16 parameters have corrections: steps, memory, checkpoints, exports, refusals."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from steps import assert_equal
from train_cases import random_batches, small, stepper

from coat_jax import quantization, telemetry
from coat_jax.errors import UserError
from coat_jax.models import PRESETS, hf
from coat_jax.optax import corrected_params
from coat_jax.quantization import Recipe
from coat_jax.training.checkpoint import Checkpoints, conversion, weights
from coat_jax.training.cluster.mesh import make_mesh
from coat_jax.training.config import TrainConfig, to_json
from coat_jax.training.setup import prepare

BF16 = {"param_dtype": jnp.bfloat16, "layers": 1, "ffn": 256, "scan": False}
IN_FP32 = BF16 | {"param_dtype": jnp.float32}
in_one_program = jax.jit(corrected_params)
SLOW = {"learning_rate": 1e-5, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0}


def corrected(name="fp8_adamw", model=BF16, **optimizer):
    return small(
        model=model, optimizer=SLOW | {"name": name, "round_params": "24_bits"} | optimizer
    )


def flat(tree):
    return np.concatenate(
        [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)]
    )


@pytest.mark.costly
@pytest.mark.parametrize("name", ["adamw", "fp8_adamw"])
def test_parameters_move_as_those_in_fp32_do(name):
    """By updates that BF16 alone would lose. Gradients in BF16 make the small difference."""
    batches = random_batches(1) * 4
    run = stepper(corrected(name))
    wide = stepper(small(model=IN_FP32, optimizer=SLOW | {"name": name}))
    first = run.state()
    begin = flat(first.params)
    same = jax.tree.map(lambda p: jax.device_put(np.float32(p), p.sharding), first.params)
    exact, _ = wide.run(batches, wide.state()._replace(params=same))
    after, _ = run.run(batches, first)
    moved = flat(in_one_program(after.params, after.moments)) - begin
    wanted = flat(exact.params) - begin
    assert np.corrcoef(moved, wanted)[0, 1] > 0.97
    assert np.mean(flat(after.params) == begin) > 0.5


def test_telemetry_finds_the_same_moments():
    plain, in_24_bits = (
        telemetry.moments(stepper(config).state().moments)
        for config in (small(model=BF16, optimizer=SLOW), corrected())
    )
    assert in_24_bits == plain != []


def test_a_7b_takes_at_most_7_1_bytes_a_parameter_with_its_gradients():
    config = TrainConfig(
        model=dataclasses.replace(PRESETS["llama2_7b"], param_dtype=jnp.bfloat16),
        optimizer=corrected().optimizer,
        total_steps=10,
        global_batch_size=1,
        sequence_length=128,
    )
    state = prepare(config, make_mesh(config.mesh, jax.devices()[:1])).abstract

    def size(tree):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    per_parameter = (2 * size(state.params) + size(state.moments)) / parameters
    assert 7.0 < per_parameter < 7.1


def assert_same(got, wanted):
    """The leaves alone: the variables of a loaded model have other metadata."""
    assert_equal(*map(jax.tree.leaves, (got, wanted)))


def save_run(folder, config):
    """A run with one checkpoint, whose corrections are random; returns the state in it."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        if leaf.dtype != jnp.int8:
            return leaf
        return jax.device_put(rng.integers(-128, 128, leaf.shape, np.int8), leaf.sharding)

    state = stepper(config).state()
    state = state._replace(moments=jax.tree.map(draw, state.moments))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(2, state, {}, wait=True)
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    return state


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corrected") / "run"
    return folder, save_run(folder, corrected())


def test_a_checkpoint_restores_corrections_and_refuses_a_state_without(saved_run):
    folder, state = saved_run
    with Checkpoints(folder / "checkpoints") as checkpoints:
        assert_equal(checkpoints.restore(stepper(corrected()).abstract).state, state)
        with pytest.raises(UserError, match="corrections"):
            checkpoints.require_like(stepper(small(model=BF16, optimizer=SLOW)).abstract)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_models_and_exports_have_bf16_values_or_all_24_bits(saved_run, tmp_path, dtype):
    folder, state = saved_run
    in_full = in_one_program(state.params, state.moments)
    assert np.any(flat(in_full) != flat(state.params))
    wanted = in_full if dtype == "float32" else state.params
    config = dataclasses.replace(weights.model_config(folder), param_dtype=dtype)
    assert_same(nnx.state(weights.load(folder, config)), wanted)
    conversion.convert(folder, tmp_path / "hf", dtype=dtype)
    assert_same(nnx.state(hf.load(tmp_path / "hf", config)), wanted)
    conversion.convert(folder, tmp_path / "int8", Recipe(format="int8"), dtype=dtype)
    assert_same(quantization.load(tmp_path / "int8", config).embed[...], wanted["embed"][...])


@pytest.mark.parametrize(
    "config",
    [corrected(release_gradients=True), small(model=IN_FP32, optimizer=SLOW | {"name": "adamw"})],
    ids=["corrections", "none"],
)
def test_models_are_loaded_in_fp32_whatever_the_state(config, tmp_path):
    state = save_run(tmp_path, config)
    wide = dataclasses.replace(weights.model_config(tmp_path), param_dtype=jnp.float32)
    corrects = config.optimizer.round_params == "24_bits"
    wanted = in_one_program(state.params, state.moments) if corrects else state.params
    assert_same(nnx.state(weights.load(tmp_path, wide)), wanted)


def test_parameters_in_fp32_need_no_corrections():
    with pytest.raises(UserError, match=r"model\.param_dtype=float32\. Set --param_dtype bf"):
        small(optimizer={"round_params": "24_bits"})


def test_a_checkpoint_that_is_removed_while_it_is_read_is_an_error(saved_run):
    """Of files that are not there tensorstore reads zeros."""
    folder, state = saved_run
    wide = dataclasses.replace(weights.model_config(folder), param_dtype=jnp.float32)
    embed = weights.parameters_of(folder, wide)[("embed",)]
    whole = (slice(None),) * len(embed.shape)
    in_full = corrected_params(state.params, state.moments)["embed"]
    np.testing.assert_array_equal(embed.read(whole), in_full)
    checkpoint = folder / "checkpoints" / "2"
    deleted = checkpoint.rename(checkpoint.with_suffix(".deleted"))
    with pytest.raises(UserError, match="checkpoints/2 was removed while it was read"):
        embed.read(whole)
    deleted.rename(checkpoint)
