"""Two processes train what one does, and a signal to one of them saves the work of both."""

import json
import signal
import time

import quick
from forks import Fork
from processes import SECONDS, begin_all, outputs

CONFIG = """
from train_cases import small

def config():
    return small(model=dict(layers=1, scan=False), total_steps={steps}, cache={cache!r})
"""
STEPS = 8


def losses(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records]


def test_two_processes_stop_resume_and_train_what_one_does(tmp_path):
    """The same two devices, so the same program: not a bit of a loss differs.

    Takes a quarter of a minute of a processor: five processes trace and compile.
    """
    config, one, two = tmp_path / "config.py", tmp_path / "one", tmp_path / "two"
    config.write_text(CONFIG.format(steps=STEPS, cache=str(tmp_path / "cache")))
    command = ["-m", "coat_jax", "train", config, "--mesh.fsdp", "2", "--debug", "--out"]
    devices = f"{quick.FLAGS} --xla_force_host_platform_device_count=2"
    alone = Fork([*command, one], XLA_FLAGS=devices)
    together = begin_all([*command, two], 2, begin=Fork)
    end = time.monotonic() + SECONDS
    while not (two / "config.json").exists():  # written when both notice signals
        assert time.monotonic() < end
        time.sleep(0.05)
    together[1].send_signal(signal.SIGUSR1)
    outputs(together, code=143)
    stopped = losses(two)
    assert 0 < len(stopped) < STEPS
    checkpoints = [path.name for path in (two / "checkpoints").iterdir()]
    assert checkpoints == [str(len(stopped))]

    outputs(begin_all([*command, two], 2, begin=Fork))
    outputs([alone])
    assert losses(two) == losses(one)
    assert len(losses(two)) == STEPS
    assert losses(two)[: len(stopped)] == stopped
