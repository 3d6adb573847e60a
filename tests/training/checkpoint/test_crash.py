"""A process may be killed at any moment, or find the disk full: what was saved before is there.

The processes are real: this file, run as a program. It saves one step after another, every number
of a state being its step, and prints a step when its checkpoint is complete.
"""

import itertools
import os
import resource
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forks import Fork
from processes import SECONDS

from coat_jax import manifest
from coat_jax.training.checkpoint import Checkpoints
from coat_jax.writing import DiskFull

SIZE = 1 << 16


def state_of(step):
    return jax.device_put(  # jnp.full compiles a program, in each process
        {
            "step": np.int32(step),
            "w": np.full(SIZE, step, np.float32),
            "codes": np.full(SIZE, step % 256, np.uint8),
        }
    )


def restore(checkpoints):
    """The newest step, whose state must be of that step in all its parts."""
    step, state, extra = checkpoints.restore(jax.eval_shape(lambda: state_of(0)))
    assert extra == {"step": step}
    for got, wanted in zip(*map(jax.tree.leaves, (state, state_of(step))), strict=True):
        np.testing.assert_array_equal(got, wanted)
    return step


def run(folder):
    with Checkpoints(folder, keep=2, note=print) as checkpoints:
        for step in itertools.count(1):
            # The best loss recurs, so that old checkpoints are removed in turn.
            loss = abs(step % 5 - 2)
            checkpoints.save(step, state_of(step), {"step": step}, loss=loss, wait=True)
            print(f"complete: {step}", flush=True)


def killing(function, calls):
    """The function, but one of its calls kills the process half way, so to speak."""

    def wrapped(*arguments, **settings):
        nonlocal calls
        calls -= 1
        if calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **settings)

    return wrapped


MOMENTS = {
    "before the manifest": (manifest, "write"),
    "before a file is on the disk": (os, "fsync"),
    "before a folder is renamed": (Path, "rename"),
    "before a file is removed": (os, "unlink"),
}


def main(folder, moment, calls):
    if moment == "disk full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        save_until_full(folder)
    owner, name = MOMENTS[moment]
    setattr(owner, name, killing(getattr(owner, name), calls))
    run(folder)


def save_until_full(folder):
    """Finds no room in the middle of step 2, and again when there is some."""
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state_of(1), {"step": 1}, wait=True)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, unlimited[1]))
        noise = np.random.default_rng(0).bytes(4 * SIZE)  # which nothing compresses
        state = {f"w{i}": jnp.asarray(np.frombuffer(noise, np.float32)) for i in range(8)}
        checkpoints.save(2, state, {"step": 2})
        try:
            checkpoints.wait()
        except DiskFull as error:
            print(error)
        print(checkpoints.steps())
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        checkpoints.save(3, state_of(3), {"step": 3}, wait=True)
        print(checkpoints.steps())
    sys.exit()


def assert_nothing_is_lost(folder, completed):
    """The newest checkpoint is whole, no older than the last complete one, and a run goes on."""
    with Checkpoints(folder, note=pytest.fail) as checkpoints:
        newest = restore(checkpoints)
        assert newest - completed[-1] in (0, 1)
        for step in checkpoints.steps():
            manifest.check(folder / str(step))
        checkpoints.save(newest + 1, state_of(newest + 1), {"step": newest + 1})
        assert restore(checkpoints) == newest + 1


@pytest.mark.parametrize(
    ("moment", "calls"),
    [
        ("before the manifest", 3),
        ("before a file is on the disk", 8),
        ("before a folder is renamed", 7),
        ("before a folder is renamed", 8),
        ("before a file is removed", 3),
    ],
)
def test_a_process_may_be_killed_at_the_worst_moment(tmp_path, moment, calls):
    folder = tmp_path / "checkpoints"
    process = Fork([__file__, folder, moment, calls])
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL, errors
    completed = [int(line.split()[1]) for line in output.splitlines() if "complete:" in line]
    assert completed
    assert_nothing_is_lost(folder, completed)


def test_a_disk_that_fills_up_costs_no_earlier_checkpoint(tmp_path):
    process = Fork([__file__, tmp_path / "checkpoints", "disk full", 0])
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    said, left, steps = output.splitlines()
    assert f"of step 2 does not fit in {tmp_path}/checkpoints (File too large): " in said
    assert said.endswith("what was saved before is intact.")
    assert (left, steps) == ("[1]", "[1, 3]")
    for logged in ("orbax", "never retrieved"):  # with a traceback for each array
        assert logged not in errors
    assert_nothing_is_lost(tmp_path / "checkpoints", [3])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
