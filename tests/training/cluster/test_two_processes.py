"""Two processes train what one does, and a signal to one of them saves the work of both."""

import contextlib
import itertools
import json
import signal
import time

from forks import Fork
from processes import SECONDS, begin_all, outputs
from train_cases import mesh_of, small

from coat_jax.training.cluster.mesh import open_data, place
from coat_jax.training.setup import prepare

# Optax's AdamW, because it is traced sooner.
CONFIG = small(
    model={"layers": 1, "scan": False}, optimizer={"name": "adamw"}, total_steps=8, cache=None
)
SOURCE = """
import dataclasses
from training.cluster.test_two_processes import CONFIG

def config():
    return dataclasses.replace(CONFIG, cache={cache!r})
"""


def losses(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records]


def test_two_processes_stop_resume_and_train_what_one_does(tmp_path):
    """The same two devices, so the same program: not a bit of a loss differs.

    Takes seconds of a processor: five processes trace the step.
    """
    out = tmp_path / "out"
    (tmp_path / "config.py").write_text(SOURCE.format(cache=str(tmp_path / "cache")))
    command = ["-m", "coat_jax", "train", tmp_path / "config.py", "--out", out]
    command += ["--mesh.fsdp", "2", "--debug"]
    together = begin_all(command, 2, begin=Fork)
    end = time.monotonic() + SECONDS
    while not (out / "config.json").exists():  # written when both notice signals
        assert time.monotonic() < end
        time.sleep(0.05)
    together[1].send_signal(signal.SIGUSR1)
    outputs(together, code=143)
    stopped = losses(out)
    assert 0 < len(stopped) < CONFIG.total_steps
    checkpoints = [path.name for path in (out / "checkpoints").iterdir()]
    assert checkpoints == [str(len(stopped))]

    outputs(begin_all(command, 2, begin=Fork))
    mesh, wanted = mesh_of((1, 2, 1)), []
    with contextlib.closing(open_data(CONFIG, mesh, "train")) as data:
        alone = prepare(CONFIG, mesh, example=data.example)
        state, program = alone.new_state(), alone.lower().compile()
        for batch in itertools.islice(data, CONFIG.total_steps):
            state, report = program(state, place(batch, mesh, microbatches=1))
            wanted.append(report.loss.item())
    assert losses(out) == wanted
    assert losses(out)[: len(stopped)] == stopped
