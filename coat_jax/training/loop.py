"""The loop: from a config to a trained model.

    config -> mesh -> data -> compiled step -> state, new or resumed -> steps

All files of a run are in its folder: see `run_folder`.
"""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import Mesh

from coat_jax.multihost import run_on_main
from coat_jax.training.checkpoint import Checkpoints
from coat_jax.training.cluster.mesh import make_mesh, open_data, place
from coat_jax.training.cluster.stop import Stop
from coat_jax.training.compilation import use_cache
from coat_jax.training.config import TrainConfig, to_json
from coat_jax.training.held_out import Evaluation
from coat_jax.training.report import accounting
from coat_jax.training.report.metrics import Metrics, require_installed
from coat_jax.training.report.progress import Progress, say
from coat_jax.training.report.recorder import Recorder
from coat_jax.training.report.telemetry import Telemetry
from coat_jax.training.run_folder import RunFolder
from coat_jax.training.setup import TrainSetup, compile_steps, prepare, require_same_model

if TYPE_CHECKING:
    from rich.console import Console


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        step: the last one taken.
        loss: the last loss that this call recorded; NaN if it took no step.
        held_out_loss: the last held-out loss that this call measured; None if it measured none.
        stopped: whether a signal ended it before the last step.
    """

    step: int
    loss: float
    held_out_loss: float | None
    stopped: bool


def train(config: TrainConfig, console: "Console | None" = None) -> Outcome:
    """Trains until the last step or a signal to stop; resumes the run in the folder, if any.

    `console`, by default standard output, shows the progress.
    """
    if console is None:
        from rich.console import Console

        console = Console()
    use_cache(config.cache, note=partial(say, console))
    mesh = make_mesh(config.mesh)
    with (
        jax.set_mesh(mesh),
        accounting.explain_out_of_memory(),
        contextlib.ExitStack() as stack,
    ):
        return _Run(config, mesh, console, stack).take_steps()


class _Run:
    """A run and the parts that its steps need, opened after the checks that may refuse it."""

    def __init__(
        self, config: TrainConfig, mesh: Mesh, console: "Console", stack: contextlib.ExitStack
    ) -> None:
        note = partial(say, console)
        folder = RunFolder(config, note=note)
        if config.init_from is not None and folder.begins():
            require_same_model(config.init_from, config.model)
        run_on_main(lambda: require_installed(config.writers))
        self.data = open_data(config, mesh, "train")
        stack.callback(self.data.close)
        self.setup = setup = prepare(config, mesh, example=self.data.example)
        self.evaluation = Evaluation(config, setup.graph, mesh) if config.evaluation.every else None
        stack.callback(folder.release)
        for change in run_on_main(folder.claim):
            note(f"Continues with a changed config: {change}.")
        note(f"Trains on {self.data.description}.")
        # A stop requested during compilation takes effect after the first step.
        self.stop = stack.enter_context(Stop())
        keep, keep_best = config.checkpoint.keep, config.checkpoint.keep_best
        self.checkpoints = stack.enter_context(
            Checkpoints(folder.checkpoints, keep=keep, keep_best=keep_best, note=note)
        )
        saved = self.checkpoints.require_like(setup.abstract)
        self.step = done = saved or 0
        run_on_main(lambda: folder.write_config(end_of_text=self.data.end_of_text))
        self.programs = compile_steps(setup, console, done=done)
        self.telemetry = None
        if config.telemetry.every and done < config.total_steps:
            self.telemetry = _compile_telemetry(setup, note, self.data.example)
        seconds = 0.0
        if saved is None:
            self.state = setup.new_state()
        else:
            _, self.state, extra = self.checkpoints.restore(setup.abstract)
            self.data.restore(extra["data"])
            seconds = extra["seconds"]
            note(f"Resumes after step {done:,} of {config.total_steps:,}.")
            if done == config.total_steps:
                note("The run is complete. To train it further, raise --total_steps.")
        self.metrics = Metrics(
            folder.path,
            writers=config.writers,
            config=to_json(config),
            resume_step=done,
            note=note,
        )
        stack.callback(self.metrics.close)
        progress = Progress(console, steps=config.total_steps, done=done)
        stack.enter_context(progress.bar)  # its last state stays on the screen
        self.recorder = Recorder(
            config,
            mesh,
            self.metrics,
            progress,
            step=done,
            skipped=int(self.state.skipped),
            seconds=seconds,
        )

    def take_steps(self) -> Outcome:
        """Takes the steps that are left; evaluates and saves where that is due."""
        config, recorder, telemetry = self.setup.config, self.recorder, self.telemetry
        program: Any = None
        held_out: float | None = None
        stopped = False
        while self.step < config.total_steps and not stopped:
            program = self.programs.pop(self.step, program)
            microbatches = config.gradient_accumulation_steps
            batch = place(next(self.data), self.setup.mesh, microbatches=microbatches)
            if telemetry and (numbers := telemetry.measure(self.step + 1, self.state, batch)):
                recorder.flush()
                recorder.take_telemetry(self.step + 1, numbers, telemetry.warning(numbers))
                recorder.pause(self.step)
            self.state, report = program(self.state, batch)
            self.step += 1
            recorder.take(self.step, report)
            if self.metrics.failure is not None:
                self.stop.request()
            stopped = self.stop.is_requested()
            at_end = self.step == config.total_steps
            evaluates, saves = (
                part.every > 0 and (at_end or self.step % part.every == 0)
                for part in (config.evaluation, config.checkpoint)
            )
            saves |= stopped
            if not evaluates and not saves:
                continue
            recorder.flush()
            if self.evaluation and evaluates:
                held_out, statistics = self.evaluation.measure(self.state.params)
                recorder.take_held_out(self.step, held_out, statistics)
            if saves:
                self.metrics.sync()  # records are on the disk before the checkpoint
                extra = {
                    "data": self.data.state(),
                    "seconds": recorder.seconds,  # in all its processes
                    "config": to_json(config),
                }
                loss = held_out if evaluates else None
                self.checkpoints.save(self.step, self.state, extra, loss=loss)
            recorder.pause(self.step)
        recorder.flush()
        if self.metrics.failure is not None:
            raise self.metrics.failure
        stopped = stopped and self.step < config.total_steps
        return Outcome(self.step, recorder.loss, held_out, stopped)


def _compile_telemetry(
    setup: TrainSetup, note: Callable[[str], None], example: Any
) -> Telemetry | None:
    """Returns the telemetry of a run; None if nothing of it is in 8 bits."""
    begin = time.perf_counter()
    config, mesh, _, graph, abstract, _ = setup
    telemetry = Telemetry(config, graph, abstract, mesh, example)
    if telemetry.empty:
        note("Nothing of this run is in 8 bits: there is no telemetry.")
        return None
    note(f"Compiled the telemetry in {time.perf_counter() - begin:.1f} s.")
    return telemetry
