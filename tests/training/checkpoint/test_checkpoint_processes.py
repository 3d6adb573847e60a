"""Two processes write one checkpoint, each its own shards, and agree on which one to read.

This file is also the program that the two run.
"""

import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import quick
from forks import Fork
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import begin_all, outputs

from coat_jax import writing
from coat_jax.errors import UserError
from coat_jax.multihost import run_on_main
from coat_jax.optax import restore_state, save_state
from coat_jax.training.checkpoint import Checkpoints
from coat_jax.training.cluster import distributed


def state_of(step, mesh):
    numbers = np.arange(64, dtype=np.float32).reshape(8, 8) + step
    shardings = {"rows": P("x"), "columns": P(None, "x"), "replicated": P()}
    return {
        name: jax.make_array_from_callback(
            (8, 8), NamedSharding(mesh, spec), lambda index: numbers[index]
        )
        for name, spec in shardings.items()
    }


def assert_same(got, wanted):
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert a.sharding == b.sharding
        for mine, expected in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(mine.data, expected.data)


def truncate(folder):
    file = max(folder.rglob("d/*"), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])


def main(folder):
    distributed.start()
    process = jax.process_index()
    meshes = [
        jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
        for shape in ((4, 1), (2, 2))
    ]
    notes = []
    with Checkpoints(folder, note=notes.append) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step, meshes[0]), {"step": step})
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.restore(state_of(0, meshes[0])).step == 2
        run_on_main(lambda: truncate(folder / "2"))
        step, state, extra = checkpoints.restore(state_of(0, meshes[1]))
        assert (step, extra) == (1, {"step": 1})
        assert_same(state, state_of(1, meshes[1]))
        assert len(notes) == (process == 0)
        # The first finds its disk full, and both say so.
        usage = shutil.disk_usage(folder)
        if process == 0:
            writing.shutil.disk_usage = lambda _: usage._replace(free=0)
        try:
            checkpoints.save(3, state_of(3, meshes[0]), {})
        except UserError as error:
            print(error.exit_code, error)
    # A state by itself has checksums when any process has saved it, and none restores damage.
    path = folder.parent / "state"
    save_state(path, state_of(5, meshes[0]))
    assert (path / "manifest.json").exists()
    assert_same(restore_state(path, state_of(0, meshes[1])), state_of(5, meshes[1]))
    run_on_main(lambda: truncate(path))
    with pytest.raises(UserError, match="state is damaged"):
        restore_state(path, state_of(0, meshes[0]))
    # What fails on the first process ends the others, too.
    with pytest.raises(FileNotFoundError) as missing:
        run_on_main((folder / "missing").read_text)
    assert Path(missing.value.filename) == folder / "missing"
    with pytest.raises(RuntimeError if process else ZeroDivisionError):
        run_on_main(lambda: 1 / 0)
    with pytest.raises(RuntimeError if process else AttributeError, match="pickle"):
        run_on_main(lambda: lambda: None)


def test_two_processes_act_as_one(tmp_path):
    folder = tmp_path / "lr=[0.1]"
    devices = f"{quick.FLAGS} --xla_force_host_platform_device_count=2"
    for output in outputs(begin_all([__file__, folder], 2, begin=Fork, XLA_FLAGS=devices)):
        assert "3 The checkpoint of step 3 does not fit" in output
    shards = {path.name for path in (folder / "1" / "state").iterdir()}
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= shards


if __name__ == "__main__":
    main(Path(sys.argv[1]))
