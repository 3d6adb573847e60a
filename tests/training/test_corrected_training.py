"""A run whose BF16 parameters have corrections: steps, memory, checkpoints, exports, refusals."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train_cases import SMALL, random_batches, small, stepper

from coat_jax import quantization, telemetry
from coat_jax.errors import UserError
from coat_jax.models import PRESETS, hf
from coat_jax.optax import corrected_params
from coat_jax.quantization import Recipe
from coat_jax.training.checkpoint import Checkpoints, conversion, weights
from coat_jax.training.cluster.mesh import make_mesh
from coat_jax.training.config import TrainConfig
from coat_jax.training.preparation import prepare
from coat_jax.training.resume_rules import changes, to_json

BF16 = {"param_dtype": jnp.bfloat16, "layers": 1, "ffn": 256}
in_one_program = jax.jit(corrected_params)
SLOW = {"learning_rate": 1e-5, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0}


def corrected(name="fp8_adamw", **optimizer):
    return small(model=BF16, optimizer=SLOW | {"name": name, "correct_params": True} | optimizer)


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
    in_fp32 = BF16 | {"param_dtype": jnp.float32}
    wide = stepper(small(model=in_fp32, optimizer=SLOW | {"name": name}))
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
    plain = stepper(small(model=BF16, optimizer=SLOW)).state().moments
    with_corrections = stepper(corrected()).state().moments
    found = telemetry.moments(with_corrections)
    assert found
    assert found == telemetry.moments(plain)


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


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """The folder of a run with one checkpoint, and the state in it."""
    folder = tmp_path_factory.mktemp("corrected") / "run"
    config = corrected()
    state, _ = stepper(config).run(random_batches(2))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(2, state, {}, wait=True)
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    return folder, state


def test_a_checkpoint_restores_corrections_and_refuses_a_state_without(saved_run):
    folder, state = saved_run
    with Checkpoints(folder / "checkpoints") as checkpoints:
        restored = checkpoints.restore(stepper(corrected()).abstract).state
        jax.tree.map(np.testing.assert_array_equal, restored, state)
        with pytest.raises(UserError, match="corrections"):
            checkpoints.require_like(stepper(small(model=BF16, optimizer=SLOW)).abstract)


def test_a_model_is_loaded_in_bf16_or_with_all_24_bits(saved_run):
    folder, state = saved_run
    in_full = in_one_program(state.params, state.moments)
    for dtype, wanted in ((jnp.bfloat16, state.params), (jnp.float32, in_full)):
        config = dataclasses.replace(weights.model_config(folder), param_dtype=dtype)
        model = weights.load(folder, config)
        for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == dtype
            np.testing.assert_array_equal(a, b)
    assert np.any(flat(in_full) != flat(state.params))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_in_8_bits_is_made_of_all_24_bits_in_fp32(saved_run, tmp_path, dtype):
    folder, state = saved_run
    conversion.to_quantized(folder, tmp_path / "out", Recipe(format="int8"), dtype=dtype)
    wanted = state.params
    if dtype == "float32":
        wanted = in_one_program(state.params, state.moments)
    like = dataclasses.replace(weights.model_config(folder), param_dtype=dtype)
    small = quantization.load(tmp_path / "out", like)
    np.testing.assert_array_equal(small.embed[...], wanted["embed"][...])
    assert small.embed[...].dtype == dtype


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_an_export_has_bf16_values_or_all_24_bits(saved_run, tmp_path, dtype):
    folder, state = saved_run
    conversion.to_hugging_face(folder, tmp_path / "out", dtype=dtype)
    wanted = state.params
    if dtype == "float32":
        wanted = in_one_program(state.params, state.moments)
    like = dataclasses.replace(weights.model_config(folder), param_dtype=dtype or "bfloat16")
    exported = nnx.state(hf.load(tmp_path / "out", like))
    for a, b in zip(jax.tree.leaves(exported), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_export_has_all_24_bits_of_a_run_that_releases_gradients(tmp_path):
    config = small(
        model=BF16 | {"scan": False},
        optimizer=SLOW | {"correct_params": True, "release_gradients": True},
    )
    state = with_random_corrections(stepper(config).state())
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(2, state, {}, wait=True)
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    wide = dataclasses.replace(weights.model_config(tmp_path), param_dtype=jnp.float32)
    read = nnx.state(weights.load(tmp_path, wide))
    wanted = in_one_program(state.params, state.moments)
    for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.any(flat(wanted) != flat(state.params))


def with_random_corrections(state):
    """As after some steps, none of which is compiled."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        if leaf.dtype != jnp.int8:
            return leaf
        return jax.device_put(rng.integers(-128, 128, leaf.shape, np.int8), leaf.sharding)

    return state._replace(moments=jax.tree.map(draw, state.moments))


@pytest.mark.parametrize("name", ["adamw", "fp8_adamw"])
def test_a_run_without_corrections_is_loaded_in_fp32(name, tmp_path):
    """Whatever state its optimizer has, where another one has corrections."""
    config = small(model={"layers": 1, "ffn": 256}, optimizer=SLOW | {"name": name})
    state = stepper(config).state()
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(0, state, {}, wait=True)
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    wide = dataclasses.replace(weights.model_config(tmp_path), param_dtype=jnp.float32)
    read = nnx.state(weights.load(tmp_path, wide))
    for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_in_fp32_need_no_corrections():
    with pytest.raises(UserError, match=r"model\.param_dtype=float32\. Set --param_dtype bf"):
        small(optimizer={"correct_params": True})


def test_a_run_goes_on_with_corrections_or_without_as_it_began():
    without, with_them = small(model=BF16, optimizer=SLOW), corrected()
    for now, before, named in ((with_them, without, "false"), (without, with_them, "true")):
        saved = json.loads(json.dumps(to_json(before)))
        with pytest.raises(UserError, match=f"--optimizer.correct_params {named}; or begin from"):
            changes(now, saved)
    of_earlier_version = json.loads(json.dumps(to_json(SMALL)))
    del of_earlier_version["optimizer"]["correct_params"]
    assert changes(SMALL, of_earlier_version) == []


def test_a_checkpoint_that_is_removed_while_it_is_read_is_an_error(saved_run, tmp_path):
    """Of files that are not there tensorstore reads zeros."""
    folder, state = saved_run
    shutil.copytree(folder, tmp_path / "run")
    parameters = weights.read(tmp_path / "run", corrected=True)
    embed = parameters[("embed",)]
    whole = (slice(None),) * len(embed.shape)
    np.testing.assert_array_equal(
        embed.read(whole), corrected_params(state.params, state.moments)["embed"]
    )
    checkpoint = tmp_path / "run" / "checkpoints" / "2"
    checkpoint.rename(checkpoint.with_suffix(".deleted"))
    with pytest.raises(UserError, match="checkpoints/2 was removed while it was read"):
        embed.read(whole)
