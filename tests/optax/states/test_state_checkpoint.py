"""A saved state comes back bit for bit, on any mesh, or not at all."""

import errno
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import manifest
from coat_jax.errors import UserError
from coat_jax.optax import (
    Storage,
    compress,
    fp8_adamw,
    restore_state,
    save_state,
    state_shardings,
)


def params_on(mesh_shape=None, spec=None):
    """Two leaves, the larger in FP8; on a mesh if asked."""
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((64, 1024)), "b": rng.standard_normal(64)}
    params = jax.tree.map(jnp.float32, params)
    if mesh_shape:
        names = ("x", "y")[: len(mesh_shape)]
        mesh = jax.make_mesh(mesh_shape, names, axis_types=(AxisType.Auto,) * len(names))
        params["w"] = jax.device_put(params["w"], NamedSharding(mesh, spec))
        params["b"] = jax.device_put(params["b"], NamedSharding(mesh, P()))
    return params


def stepped(tx, params):
    """A state with something in it."""
    return jax.jit(tx.update)(params, tx.init(params), params)[1]


def assert_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The state of fp8_adamw and where it was written."""
    path = tmp_path_factory.mktemp("checkpoints") / "lr=[0.1]" / "*" / "state"
    state = stepped(fp8_adamw(1e-3), params_on())
    save_state(path, state)
    return path, state


def test_a_state_comes_back_bit_for_bit(saved):
    path, state = saved
    tx = fp8_adamw(1e-3)
    assert_equal(restore_state(path, tx.init(params_on())), state)
    # From shapes alone, no state needs to be made first.
    assert_equal(restore_state(str(path), jax.eval_shape(tx.init, params_on())), state)


def test_training_goes_on_as_if_never_interrupted(saved):
    path, state = saved
    tx, params = fp8_adamw(1e-3), params_on()
    restored = restore_state(path, tx.init(params))
    update = jax.jit(tx.update)
    assert_equal(update(params, restored, params), update(params, state, params))


@pytest.mark.parametrize(
    "tx", [compress(optax.adamw(1e-3)), optax.inject_hyperparams(fp8_adamw)(learning_rate=1e-3)]
)
def test_states_of_other_transformations_come_back_too(tx, tmp_path):
    state = stepped(tx, params_on())
    save_state(tmp_path / "state", state)
    assert_equal(restore_state(tmp_path / "state", tx.init(params_on())), state)


def test_a_state_can_be_restored_onto_another_mesh(tmp_path):
    tx = fp8_adamw(1e-3)
    state = stepped(tx, params_on((8,), P(None, "x")))
    save_state(tmp_path / "state", state)
    params = params_on((4, 2), P("x", "y"))
    by_arrays = restore_state(tmp_path / "state", tx.init(params))
    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(tx.init, params),
        state_shardings(tx, params),
    )
    by_shapes = restore_state(tmp_path / "state", shapes)
    for restored in (by_arrays, by_shapes):
        assert_equal(restored, state)
        for moment in (restored[0].mu, restored[0].nu):
            for part in moment:
                assert part["w"].sharding.is_equivalent_to(params["w"].sharding, 2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Storage(second=jnp.float8_e5m2), r"nu.*uint8.*but float8_e5m2.* is expected"),
        (Storage(min_size=10**9), r"mu.*int8.*but float32.* is expected"),
        (Storage(group_size=64), r"amax.*float32\[64, 8\].*but float32\[64, 16\] is expected"),
    ],
    ids=["format", "FP32", "group size"],
)
def test_a_state_in_another_format_is_refused(saved, other, message):
    with pytest.raises(ValueError, match=message):
        restore_state(saved[0], fp8_adamw(1e-3, storage=other).init(params_on()))


def test_a_state_of_another_model_is_refused(saved):
    tx = fp8_adamw(1e-3)
    params = params_on()
    taller = {**params, "w": jnp.zeros((128, 1024))}
    with pytest.raises(ValueError, match=r"w.*\[64, 1024\].*but .*\[128, 1024\] is expected"):
        restore_state(saved[0], tx.init(taller))
    renamed = {"weight": params["w"], "b": params["b"]}
    with pytest.raises(ValueError, match=r"Only stored: .*w.*only expected: .*weight"):
        restore_state(saved[0], tx.init(renamed))
    with pytest.raises(ValueError, match=r"only expected: \['0/mu/amax/extra'"):
        restore_state(saved[0], tx.init({**params, "extra": params["b"]}))
    with pytest.raises(ValueError, match=r"another model or optimizer"):
        restore_state(saved[0], optax.adamw(1e-3).init(params))


def test_nothing_is_overwritten(saved, tmp_path):
    path, state = saved
    with pytest.raises(FileExistsError, match="exists already"):
        save_state(path, state)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        save_state(tmp_path / "empty", state)


def test_a_missing_checkpoint_is_an_error(saved, tmp_path):
    _, state = saved
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        restore_state(tmp_path / "missing", state)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        restore_state(tmp_path / "file", state)


def test_a_directory_without_a_checkpoint_is_refused(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match="empty"):
        restore_state(tmp_path / "empty", saved[1])


def test_relative_paths_work(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_state("state", saved[1])
    assert_equal(restore_state("state", saved[1]), saved[1])


def test_the_home_folder_may_be_written_as_a_shell_does(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    state = {"a": jnp.ones(3)}
    save_state("~/state", state)
    assert (tmp_path / "state").is_dir()
    np.testing.assert_array_equal(restore_state("~/state", state)["a"], state["a"])


def test_random_keys_and_numbers_are_restored_as_what_they_were(tmp_path):
    state = {
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3),
        "whole": 3,
        "real": 0.1,
        "flag": True,
        "numpy": np.float32(2.5),
        "noise": optax.add_noise(0.1, 0.1, 0).init({}),
    }
    save_state(tmp_path / "state", state)
    like = {
        **state,
        "key": jax.eval_shape(lambda: jax.random.key(0)),
        "noise": jax.eval_shape(optax.add_noise(0.1, 0.1, 7).init, {}),
    }
    got = restore_state(tmp_path / "state", like)
    for name in ("whole", "real", "flag", "numpy"):
        assert got[name] == state[name]
        assert type(got[name]) is type(state[name])
    for a, b in [(got[n], state[n]) for n in ("key", "keys")] + [
        (got["noise"].rng_key, state["noise"].rng_key)
    ]:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(jax.random.key_data(a), jax.random.key_data(b))
    with pytest.raises(ValueError, match=r"key is stored as uint32\[2\], but uint32\[4\]"):
        restore_state(tmp_path / "state", {**state, "key": jax.random.key(0, impl="rbg")})


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"a": "text"}, TypeError, r"\['a'\] is a str"),
        ({"a": len}, TypeError, r"\['a'\] is a builtin_function"),
        ({"a": 2**70}, ValueError, r"\['a'\] is .* does not fit in 64 bits"),
        ({"a": np.zeros((0, 3), np.float32)}, ValueError, r"\['a'\] has shape \(0, 3\)"),
        (
            {"a.b": np.zeros(3, np.float32), "a": {"b": np.ones(3, np.float32)}},
            ValueError,
            r"\['a'\]\['b'\] and \['a.b'\] would be stored as one array, 'a.b'",
        ),
        ({}, ValueError, r"no arrays"),
        (np.ones(3, np.float32), ValueError, r"single leaf"),
    ],
)
def test_a_state_that_could_not_be_restored_is_not_saved(state, error, message, tmp_path):
    with pytest.raises(error, match=message):
        save_state(tmp_path / "state", state)
    assert not (tmp_path / "state").exists()


def test_a_number_that_a_jitted_step_made_an_array_comes_back_as_a_number(tmp_path):
    """As Flax's TrainState has it: its step is a Python number at first."""
    fresh = {"step": 0, "share": 0.5, "w": jnp.ones(3)}
    trained = jax.jit(lambda s: {**s, "step": s["step"] + 1})(fresh)
    assert isinstance(trained["step"], jax.Array)
    save_state(tmp_path / "state", trained)
    got = restore_state(tmp_path / "state", fresh)
    assert (got["step"], got["share"]) == (1, 0.5)
    assert isinstance(got["step"], int)
    with pytest.raises(ValueError, match="step is stored as int32"):
        restore_state(tmp_path / "state", {**fresh, "step": 0.0})


def test_a_flipped_bit_is_found_wherever_it_is(saved, tmp_path):
    """Orbax by itself returns some of these states with a wrong number."""
    path, state = saved
    damaged = shutil.copytree(path, tmp_path / "state")
    for file in [file for file in damaged.rglob("*") if file.is_file() and file.stat().st_size]:
        content = file.read_bytes()
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(UserError, match="state is damaged: "):
            restore_state(damaged, state)
        file.write_bytes(content)
    assert_equal(restore_state(damaged, state), state)


def test_the_state_in_a_run_s_checkpoint_is_compared_with_the_checksums_of_the_checkpoint(
    saved, tmp_path
):
    path, state = saved
    folder = shutil.copytree(path, tmp_path / "100" / "state")
    (folder / "manifest.json").unlink()
    (tmp_path / "100" / "record.json").write_text("{}")
    manifest.write(tmp_path / "100")
    assert_equal(restore_state(folder, state), state)
    largest = max(folder.rglob("*"), key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(UserError, match=r"100 is damaged: the checksum of state/.* is wrong"):
        restore_state(folder, state)
    largest.write_bytes(content)
    # Somebody else's file of this name says nothing about the state.
    (tmp_path / "100" / "manifest.json").write_text('{"name": "mine"}')
    assert_equal(restore_state(folder, state), state)


def test_a_state_whose_checksums_cannot_be_written_is_removed(saved, tmp_path, monkeypatch):
    def fail(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("coat_jax.writing.replace", fail)
        with pytest.raises(UserError, match=r"The state x .*in .*free"):
            save_state(tmp_path / "x", saved[1])
    assert not (tmp_path / "x").exists()
    save_state(tmp_path / "x", saved[1])
    assert_equal(restore_state(tmp_path / "x", saved[1]), saved[1])


def test_a_state_that_orbax_wrote_has_no_checksums_and_is_restored(saved, tmp_path):
    path, state = saved
    plain = shutil.copytree(path, tmp_path / "state")
    (plain / "manifest.json").unlink()
    assert_equal(restore_state(plain, state), state)


def test_a_state_without_its_index_is_named(tmp_path):
    """Of one array: others, which orbax would open meanwhile, may warn much later."""
    path, state = tmp_path / "state", {"w": jnp.ones(3)}
    save_state(path, state)
    for name in ("manifest.json", "manifest.ocdbt"):
        (path / name).unlink()
    with pytest.raises(UserError, match=r"state is not a complete checkpoint: .* does not exist"):
        restore_state(path, state)
