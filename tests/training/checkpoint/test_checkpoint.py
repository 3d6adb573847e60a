"""A checkpoint comes back bit for bit, on any mesh, or is refused by name.

What a killed process or a full disk leaves behind is tried out in test_crash.py.
"""

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import manifest, writing
from coat_jax.errors import UserError
from coat_jax.manifest import DamagedCheckpoint
from coat_jax.optax import Storage, scale_by_fp8_adam
from coat_jax.optax.states.checkpoint import LiteralPath
from coat_jax.training.checkpoint.checkpoints import Checkpoints, steps_to_keep
from coat_jax.writing import DiskFull


def mesh_of(*shape):
    devices = jax.devices()[: int(np.prod(shape))]
    axes = ("x", "y")[: len(shape)]
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def shard(tree, mesh):
    """Shards every matrix over the mesh's axes, the rest on all devices."""
    return jax.tree.map(
        lambda leaf: jax.device_put(
            leaf, NamedSharding(mesh, P(*mesh.axis_names) if leaf.ndim == 2 else P())
        ),
        tree,
    )


def state_of(step, mesh=None):
    """Every dtype that training stores, with every bit pattern of the small ones.

    Made by NumPy: XLA's own copies on a CPU may turn one NaN into another.
    """
    patterns = (np.arange(1 << 16, dtype=np.uint16) + np.uint16(step)).reshape(256, 256)
    codes = patterns.astype(np.uint8)
    state = {
        "step": np.int32(step),
        "parameters": patterns.view(jnp.bfloat16),
        "codes": codes.view(jnp.float8_e4m3fn),
        "gradients": codes.view(jnp.float8_e5m2),
        "powers": codes,
        "amax": np.linspace(0, step, 64, dtype=np.float32),
    }
    return shard(state, mesh or mesh_of(8))


def like(tree):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def assert_same_bits(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_all(folder, steps, **settings):
    with Checkpoints(folder, **{"keep": 9, **settings}) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step), {"rows": step})


def silent(text):
    raise AssertionError(f"noted: {text}")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def two(folder):
    """A folder with the steps 1 and 2."""
    save_all(folder, [1, 2])
    return folder


# What comes back


def test_a_state_comes_back_bit_for_bit(tmp_path):
    """Whatever characters the folder's name has."""
    folder = tmp_path / "[!a]" / "lr=[0.1] a?%20#**"
    state = state_of(7)
    extra = {"data": {"epoch": 2, "row": 31}, "loss": 1.25, "names": ["a", "b"], "none": None}
    with Checkpoints(folder, note=silent) as checkpoints:
        assert checkpoints.steps() == []
        checkpoints.save(7, state, extra, loss=2.5)
        restored = checkpoints.restore(like(state))
        assert checkpoints.steps() == [7]
    assert (restored.step, restored.extra) == (7, extra)
    assert_same_bits(restored.state, state)
    record = json.loads((folder / "7" / "record.json").read_text())
    assert record == {"step": 7, "loss": 2.5, "extra": extra}


def test_any_step_comes_back_on_any_mesh(two):
    for step, shape in ((2, (8,)), (2, (4, 2)), (1, (2, 4)), (1, (1,))):
        wanted = state_of(step, mesh_of(*shape))
        restored = Checkpoints(two, note=silent).restore(like(wanted), step=step)
        assert restored.extra == {"rows": step}
        assert_same_bits(restored.state, wanted)
        for got, leaf in zip(*map(jax.tree.leaves, (restored.state, wanted)), strict=True):
            assert got.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_a_state_that_cannot_be_saved_is_refused_before_a_run(folder):
    message = r"cannot be saved\. \['empty'\] is empty"
    with Checkpoints(folder) as checkpoints, pytest.raises(UserError, match=message):
        checkpoints.require_like({"w": jnp.ones(2), "empty": jnp.ones(0)})


def test_arrays_may_be_donated_as_soon_as_save_returns(folder):
    mesh, numbers = mesh_of(8), np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    state = {
        f"w{i}": jax.device_put(numbers + i, NamedSharding(mesh, spec))
        for i, spec in enumerate((P("x"), P()))
    }
    wanted = like(state)
    overwrite = jax.jit(
        lambda state: jax.tree.map(lambda leaf: leaf * 0 - 1, state), donate_argnums=0
    )
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(3):
            state = overwrite(state)
        jax.block_until_ready(state)
        restored = checkpoints.restore(wanted).state
    for i in range(2):
        np.testing.assert_array_equal(restored[f"w{i}"], numbers + i)


def test_save_returns_before_the_checkpoint_is_written_unless_it_is_to_wait(folder, monkeypatch):
    write, may_write = manifest.write, threading.Event()

    def late(path):
        assert may_write.wait(30)
        write(path)

    monkeypatch.setattr(manifest, "write", late)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state_of(1), {})
        assert [path.name for path in folder.iterdir()] == ["1.unfinished"]
        may_write.set()
        checkpoints.wait()
        assert [path.name for path in folder.iterdir()] == ["1"]
        checkpoints.save(2, state_of(2), {}, wait=True)
        assert {path.name for path in folder.iterdir()} == {"1", "2"}


# Which ones stay


@pytest.mark.parametrize(
    ("losses", "keep", "keep_best", "kept"),
    [
        ({1: None, 2: None, 3: None}, 2, 1, {2, 3}),
        ({1: 1.0, 2: 3.0, 3: 2.0}, 1, 0, {3}),
        ({1: 3.0, 2: 2.0, 3: 1.0}, 1, 2, {2, 3}),
        ({1: 1.0, 2: 1.0, 3: 2.0}, 1, 1, {2, 3}),
        ({1: float("nan"), 2: float("-inf"), 3: 5.0, 4: None}, 1, 1, {3, 4}),
        ({9: None, 10: None, 100: None}, 2, 1, {10, 100}),
    ],
)
def test_the_newest_and_the_best_stay(losses, keep, keep_best, kept):
    assert steps_to_keep(losses, keep, keep_best) == kept


def test_the_others_are_removed_also_by_the_next_process(folder):
    with Checkpoints(folder, keep=2, keep_best=1) as checkpoints:
        for step, loss in [(8, 3.0), (9, 1.0), (10, 2.0), (11, None), (12, 4.0)]:
            checkpoints.save(step, state_of(step), {}, loss=loss)
        assert checkpoints.steps() == [9, 11, 12]
    assert sorted(path.name for path in folder.iterdir()) == ["11", "12", "9"]
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.restore(like(state_of(12)))
        checkpoints.save(13, state_of(13), {}, loss=3.0)
        assert checkpoints.steps() == [9, 13]


def test_no_step_is_written_over_another_runs_or_twice_or_after_a_later_one(two):
    before = (two / "2" / "manifest.json").stat()
    with Checkpoints(two) as checkpoints:
        with pytest.raises(UserError, match=r"steps \[1, 2\].*Restore the one to continue from"):
            checkpoints.save(3, state_of(3), {})
        assert checkpoints.steps() == [1, 2]
        checkpoints.restore(like(state_of(2)))
        checkpoints.save(2, state_of(2), {}, wait=True)
        with pytest.raises(UserError, match=r"Step 1 cannot be saved: .* of the steps"):
            checkpoints.save(1, state_of(1), {})
    assert (two / "2" / "manifest.json").stat() == before


# Damage: all kinds of it stand in test_step_folders.py


def truncate(folder):
    """Cuts the largest file of a checkpoint, which holds the codes."""
    files = (file for file in folder.rglob("*") if file.is_file())
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def test_damage_is_named_and_the_step_before_is_used_until_others_come_again(folder):
    save_all(folder, [1, 2, 3])
    for step in (2, 3):
        truncate(folder / str(step))
    wrong = rf"{folder}/[23] is damaged: state/\S+ has \d+ bytes instead of \d+"
    with Checkpoints(folder, keep=9) as checkpoints:
        with pytest.raises(DamagedCheckpoint, match=wrong):
            checkpoints.restore(like(state_of(2)), step=2)
        with pytest.warns(UserWarning, match=rf"{wrong}\. Using step 1 instead\.$"):
            restored = checkpoints.restore(like(state_of(1)))
        assert restored.step == 1
        assert_same_bits(restored.state, state_of(1))
        checkpoints.save(2, state_of(20), {"again": True})
        assert checkpoints.steps() == [1, 2]
        assert_same_bits(checkpoints.restore(like(state_of(2))).state, state_of(20))


def test_only_the_next_save_clears_away_an_unfinished_one(two):
    (two / "2").rename(two / "3.unfinished")
    (two / "2.deleted").mkdir()
    with Checkpoints(two, note=silent) as checkpoints:
        assert checkpoints.steps() == [1]
        assert checkpoints.restore(like(state_of(1))).step == 1
        assert (two / "3.unfinished").exists()
        checkpoints.save(2, state_of(2), {})
    assert sorted(path.name for path in two.iterdir()) == ["1", "2"]


def test_without_a_whole_checkpoint_nothing_is_restored(two, tmp_path):
    with pytest.raises(UserError, match="no checkpoint in"):
        Checkpoints(tmp_path / "empty").restore(like(state_of(1)))
    with pytest.raises(UserError, match=r"no checkpoint of step 5 .* of \[1, 2\]"):
        Checkpoints(two).restore(like(state_of(1)), step=5)
    truncate(two / "2")
    (two / "1" / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"2 is damaged.*1 is damaged.*No checkpoint"):
        Checkpoints(two).restore(like(state_of(1)))


# Bad input


def training_state(width=256, **storage):
    params = {"w": jnp.zeros((64, width)), "b": jnp.zeros(64)}
    return params, scale_by_fp8_adam(storage=Storage(**storage)).init(params)


def test_another_model_or_format_is_refused(folder):
    others = {
        r"0/w is stored as float32\[64, 256\], but float32\[64, 512\] is": training_state(512),
        r"uint8\[64, 256\], but float8_e5m2\[": training_state(second=jnp.float8_e5m2),
        r"Only stored: \['0/b'.*only expected: \['b', 'w'\].*Restore": training_state()[0],
    }
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, training_state(), {})
        for message, other in others.items():
            with pytest.raises(ValueError, match=message):
                checkpoints.restore(like(other))


def test_a_full_disk_is_found_before_writing(two, monkeypatch):
    usage = writing.shutil.disk_usage(two)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage._replace(free=5_000_000))
    with Checkpoints(two) as checkpoints:
        checkpoints.restore(like(state_of(2)))
        large = {"w": jnp.zeros(1_000_000)}
        with pytest.raises(DiskFull, match=r"step 3 does not fit in .*up to 5\.0 MB.* 5\.0 MB are"):
            checkpoints.save(3, large, {})
        assert sorted(path.name for path in two.iterdir()) == ["1", "2"]
        checkpoints.save(3, {"w": jnp.zeros(500_000)}, {})
        assert checkpoints.steps() == [2, 3]


def test_an_error_in_the_background_is_raised_by_what_comes_next(folder, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state_of(1), {}, wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "write", fail)
            checkpoints.save(2, state_of(2), {})
            with pytest.raises(OSError, match=r"step 2 could not be written in .*denied"):
                checkpoints.save(3, state_of(3), {})
        assert checkpoints.steps() == [1]
        checkpoints.save(3, state_of(3), {})
        assert checkpoints.steps() == [1, 3]


def test_a_save_that_cannot_be_read_back_is_no_checkpoint(folder, monkeypatch):
    """Orbax finds no files of processes, so it writes no index of the arrays."""
    monkeypatch.setattr(LiteralPath, "glob", lambda path, pattern: iter(()))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, {})  # one array: others may warn much later
        with pytest.raises(UserError, match=r"state is not a complete checkpoint: .* not exist"):
            checkpoints.wait()
    assert list(folder.iterdir()) == []


def test_what_a_killed_run_left_over_is_removed_before_the_next_save(folder, monkeypatch):
    """Damaged checkpoints do not displace whole ones."""
    save_all(folder, [1, 2, 3, 4, 5])
    truncate(folder / "5")
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with Checkpoints(folder, keep=2, keep_best=0, note=[].append) as checkpoints:
        assert checkpoints.restore(like(state_of(4))).step == 4
        with pytest.raises(DiskFull):
            checkpoints.save(5, state_of(5), {})
        assert checkpoints.steps() == [3, 4, 5]


def test_a_checkpoint_that_cannot_be_removed_is_noted_and_does_not_end_the_run(two, monkeypatch):
    notes, rename = [], Path.rename

    def refuse(path, target):
        if path.name == "1":
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    with Checkpoints(two, keep=1, keep_best=0, note=notes.append) as checkpoints:
        checkpoints.restore(like(state_of(2)))
        monkeypatch.setattr(Path, "rename", refuse)
        checkpoints.save(3, state_of(3), {}, wait=True)
        assert checkpoints.steps() == [1, 3]
    assert all("The checkpoint of step 1 could not be removed" in note for note in notes)
    assert notes
