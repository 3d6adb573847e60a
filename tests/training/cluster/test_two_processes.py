"""Two processes train what one does, and a signal to one of them saves the work of both.

A test takes some ten seconds: its processes import JAX and trace a step each.
"""

import json
import time

import pytest
import quick
from forks import Fork
from processes import begin_all, outputs

CONFIG = """
from train_cases import small

def config():
    return small(model=dict(layers=1, scan=False), total_steps={steps}, cache={cache!r})
"""
STEPS = 8


@pytest.fixture
def command(tmp_path):
    """What trains over two devices, into a folder."""
    config = tmp_path / "config.py"
    config.write_text(CONFIG.format(steps=STEPS, cache=str(tmp_path / "cache")))
    return lambda folder: [
        "-m", "coat_jax", "train", config, "--mesh.fsdp", "2", "--out", folder, "--debug"
    ]  # fmt: skip


def losses(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records]


def wait_for(path, seconds=600):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.05)


def test_two_processes_stop_resume_and_train_what_one_does(tmp_path, command):
    """The same two devices, so the same program: not a bit of a loss differs.

    Takes a quarter of a minute of a processor: five processes trace and compile.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    devices = f"{quick.FLAGS} --xla_force_host_platform_device_count=2"
    alone = Fork(command(one), XLA_FLAGS=devices)
    together = begin_all(command(two), 2, begin=Fork)
    wait_for(two / "config.json")
    together[1].terminate()
    outputs(together, code=143)
    stopped = losses(two)
    assert 0 < len(stopped) < STEPS
    checkpoints = [path.name for path in (two / "checkpoints").iterdir()]
    assert checkpoints == [str(len(stopped))]

    outputs(begin_all(command(two), 2, begin=Fork))
    outputs([alone])
    assert losses(two) == losses(one)
    assert len(losses(two)) == STEPS
    assert losses(two)[: len(stopped)] == stopped
