"""Two processes train what one does, and a signal to one of them saves the work of both."""

import json
import shutil
import signal
import time

import quick
from forks import Fork
from processes import SECONDS, begin_all, outputs

CONFIG = """
from train_cases import small
from coat_jax.training.config import CheckpointConfig

def config():
    model = dict(layers=1, scan=False)
    every = CheckpointConfig(every=2, keep=9)
    return small(model=model, total_steps={steps}, checkpoint=every, cache={cache!r})
"""
STEPS, FIRST = 10, 2


def losses(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records]


def test_two_processes_resume_train_what_one_does_and_stop(tmp_path):
    """The same two devices, so the same program: not a bit of a loss differs.

    Takes seconds of a processor: three processes trace and compile.
    """
    config, one, two = tmp_path / "config.py", tmp_path / "one", tmp_path / "two"
    config.write_text(CONFIG.format(steps=STEPS, cache=str(tmp_path / "cache")))
    command = ["-m", "coat_jax", "train", config, "--mesh.fsdp", "2", "--debug", "--out"]
    devices = f"{quick.FLAGS} --xla_force_host_platform_device_count=2"
    outputs([Fork([*command, one], XLA_FLAGS=devices)])
    shutil.copytree(one / "checkpoints" / str(FIRST), two / "checkpoints" / str(FIRST))
    shutil.copy(one / "metrics.jsonl", two)
    together = begin_all([*command, two], 2, begin=Fork)
    end = time.monotonic() + SECONDS
    while not (two / "config.json").exists():  # written when both notice signals
        assert time.monotonic() < end
        time.sleep(0.05)
    together[1].send_signal(signal.SIGUSR1)
    outputs(together, code=143)
    stopped = losses(two)
    assert FIRST < len(stopped) < STEPS
    assert stopped == losses(one)[: len(stopped)]
    checkpoints = {int(path.name) for path in (two / "checkpoints").iterdir()}
    assert checkpoints == {*range(FIRST, len(stopped), 2), len(stopped)}
