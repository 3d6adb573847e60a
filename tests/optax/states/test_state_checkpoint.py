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
from steps import assert_equal

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

ADAMW = fp8_adamw(1e-3)


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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The state of fp8_adamw and where it was written."""
    path = tmp_path_factory.mktemp("checkpoints") / "lr=[0.1]" / "*" / "state"
    state = stepped(ADAMW, params_on())
    save_state(path, state)
    return path, state


def test_a_state_comes_back_bit_for_bit(saved, tmp_path, monkeypatch):
    path, state = saved
    assert_equal(restore_state(path, ADAMW.init(params_on())), state)
    # From shapes alone, no state needs to be made first.
    assert_equal(restore_state(str(path), jax.eval_shape(ADAMW.init, params_on())), state)
    # Relative paths, and the home folder as in a shell; and states of other transformations.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    txs = compress(optax.adamw(1e-3)), optax.inject_hyperparams(fp8_adamw)(learning_rate=1e-3)
    states = [stepped(tx, params_on()) for tx in txs]
    save_state("~/states", states)
    assert_equal(restore_state("states", [tx.init(params_on()) for tx in txs]), states)


def test_a_state_can_be_restored_onto_another_mesh(tmp_path):
    state = stepped(ADAMW, params_on((8,), P(None, "x")))
    save_state(tmp_path / "state", state)
    params = params_on((4, 2), P("x", "y"))
    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(ADAMW.init, params),
        state_shardings(ADAMW, params),
    )
    for like in (ADAMW.init(params), shapes):
        restored = restore_state(tmp_path / "state", like)
        assert_equal(restored, state)
        for part in (*restored[0].mu, *restored[0].nu):
            assert part["w"].sharding.is_equivalent_to(params["w"].sharding, 2)


def test_a_state_of_another_format_or_model_is_refused(saved):
    def state(**arguments):
        return fp8_adamw(1e-3, storage=Storage(**arguments)).init(params)

    params = params_on()
    for like, message in [
        (state(second=jnp.float8_e5m2), r"nu.*uint8.*but float8_e5m2.* is expected"),
        (state(min_size=10**9), r"mu.*int8.*but float32.* is expected"),
        (state(group_size=64), r"amax.*float32\[64, 8\].*but float32\[64, 16\] is expected"),
        (
            ADAMW.init({**params, "w": jnp.zeros((128, 1024))}),
            r"w.*\[64, 1024\].*but .*\[128, 1024\] is expected",
        ),
        (
            ADAMW.init({"weight": params["w"], "b": params["b"]}),
            r"Only stored: .*w.*only expected: .*weight",
        ),
        (ADAMW.init({**params, "extra": params["b"]}), r"only expected: \['0/mu/amax/extra'"),
        (optax.adamw(1e-3).init(params), r"another model or optimizer"),
    ]:
        with pytest.raises(UserError, match=message):
            restore_state(saved[0], like)


def test_nothing_is_overwritten_and_what_is_missing_or_incomplete_is_named(saved, tmp_path):
    path, state = saved
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for existing in (path, tmp_path / "empty"):
        with pytest.raises(FileExistsError, match="exists already"):
            save_state(existing, state)
    for missing in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(FileNotFoundError, match="no checkpoint at"):
            restore_state(missing, state)
    with pytest.raises((ValueError, FileNotFoundError), match="empty"):
        restore_state(tmp_path / "empty", state)
    # Of one array: others, which orbax would open meanwhile, may warn much later.
    path, state = tmp_path / "state", {"w": jnp.ones(3)}
    save_state(path, state)
    for name in ("manifest.json", "manifest.ocdbt"):
        (path / name).unlink()
    with pytest.raises(UserError, match=r"state is not a complete checkpoint: .* does not exist"):
        restore_state(path, state)


def test_random_keys_and_numbers_are_restored_as_what_they_were(tmp_path):
    """Numbers, too, of which a jitted step made arrays, as of the step in Flax's TrainState."""
    state = {
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3),
        "whole": 3,
        "real": 0.5,
        "flag": True,
        "numpy": np.float32(2.5),
    }
    arrays = jax.jit(lambda s: {**s, "whole": s["whole"] + 1})(state)
    assert isinstance(arrays["whole"], jax.Array)
    like = {**state, "key": jax.eval_shape(lambda: jax.random.key(0))}
    for i, (written, whole) in enumerate(((state, 3), (arrays, 4))):
        save_state(tmp_path / str(i), written)
        got = restore_state(tmp_path / str(i), like)
        for name, value in (state | {"whole": whole}).items():
            if "key" in name:
                assert got[name].dtype == value.dtype
                data = map(jax.random.key_data, (got[name], value))
                np.testing.assert_array_equal(*data)
            else:
                assert (got[name], type(got[name])) == (value, type(value))
        with pytest.raises(ValueError, match=r"key is stored as uint32\[2\], but uint32\[4\]"):
            restore_state(tmp_path / str(i), {**state, "key": jax.random.key(0, impl="rbg")})
    with pytest.raises(ValueError, match="whole is stored as int32"):
        restore_state(tmp_path / "1", {**state, "whole": 0.0})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": "text"}, r"\['a'\] is a str"),
        ({"a": len}, r"\['a'\] is a builtin_function"),
        ({"a": np.zeros((0, 3), np.float32)}, r"\['a'\] is empty"),
        (
            {"a.b": np.zeros(3, np.float32), "a": {"b": np.ones(3, np.float32)}},
            r"\['a.b'\] has the name of \['a'\]\['b'\]",
        ),
        ({}, "with arrays in it"),
        (np.ones(3, np.float32), "put a single one in a dict"),
    ],
)
def test_a_state_that_could_not_be_restored_is_not_saved(state, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_state(tmp_path / "state", state)
    assert not (tmp_path / "state").exists()


def flip(file, place):
    """Flips a bit of the byte at `place`; returns what was in the file."""
    content = file.read_bytes()
    damaged = bytearray(content)
    damaged[place % len(content)] ^= 1
    file.write_bytes(damaged)
    return content


def test_a_flipped_bit_is_found_wherever_it_is(saved, tmp_path):
    """Orbax by itself returns some of these states with a wrong number."""
    path, state = saved
    damaged = shutil.copytree(path, tmp_path / "state")
    for file in [file for file in damaged.rglob("*") if file.is_file() and file.stat().st_size]:
        content = flip(file, file.stat().st_size // 2)
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
    assert_equal(restore_state(folder, state), state)  # as orbax itself writes one
    (tmp_path / "100" / "record.json").write_text("{}")
    manifest.write(tmp_path / "100")
    assert_equal(restore_state(folder, state), state)
    largest = max(folder.rglob("*"), key=lambda file: file.stat().st_size)
    content = flip(largest, -9)
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
