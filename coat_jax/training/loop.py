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
from coat_jax.printable import printable
from coat_jax.training import resume_rules
from coat_jax.training.checkpoint import Checkpoints, resume_state
from coat_jax.training.checkpoint.resume_state import ResumeState
from coat_jax.training.cluster.batches import open_data, place
from coat_jax.training.cluster.mesh import batch_parts, make_mesh, require_fitting
from coat_jax.training.cluster.stop import Stop
from coat_jax.training.compilation_cache import use_cache
from coat_jax.training.config import TrainConfig
from coat_jax.training.data import Loader
from coat_jax.training.held_out import Evaluation
from coat_jax.training.preparation import Prepared, prepare
from coat_jax.training.programs import Programs
from coat_jax.training.report import accounting
from coat_jax.training.report.metrics import Metrics, require_installed
from coat_jax.training.report.progress import Progress
from coat_jax.training.report.recorder import Recorder
from coat_jax.training.report.telemetry import Telemetry
from coat_jax.training.run_folder import RunFolder
from coat_jax.training.state import State, require_same_model
from coat_jax.writing import NotWritten

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

    Args:
        config: the run.
        console: where progress is shown; by default standard output.
    """
    if console is None:
        from rich.console import Console

        console = Console()
    use_cache(config.cache, note=partial(_say, console))
    mesh = make_mesh(config.mesh)
    require_fitting(config, mesh)
    with (
        jax.set_mesh(mesh),
        accounting.explaining_out_of_memory(config, batch_parts=batch_parts(mesh)),
    ):
        return _train(config, mesh, console)


def _train(config: TrainConfig, mesh: Mesh, console: "Console") -> Outcome:
    """Prepares the run, with the checks that may refuse it first, and takes the steps."""
    say = partial(_say, console)
    folder = RunFolder(config, note=say)
    if folder.begins():
        require_same_model(config)
    run_on_main(lambda: require_installed(config.writers))
    data = open_data(config, mesh, "train")
    prepared = prepare(config, mesh)
    evaluation = Evaluation(config, prepared.graph, mesh) if config.evaluation.every else None
    with contextlib.ExitStack() as stack:
        stack.callback(data.close)
        stack.callback(folder.release)
        for change in run_on_main(folder.claim):
            say(f"Continues with a changed config: {change}.")
        say(f"Trains on {data.description}.")
        # A stop requested during compilation takes effect after the first step.
        stop = stack.enter_context(Stop())
        retention = {"keep": config.checkpoint.keep, "keep_best": config.checkpoint.keep_best}
        checkpoints = stack.enter_context(Checkpoints(folder.checkpoints, **retention, note=say))
        saved = checkpoints.require_like(prepared.abstract)
        run_on_main(lambda: folder.write_config(end_of_text=data.end_of_text))
        programs = Programs(prepared, console, example=data.example, done=saved or 0)
        telemetry = None
        if config.telemetry.every and (saved or 0) < config.total_steps:
            telemetry = _compile_telemetry(prepared, say, data.example)
        resume = ResumeState()
        if saved is None:
            state = prepared.new_state()
        else:
            step, state, extra = checkpoints.restore(prepared.abstract)
            resume = resume_state.from_json(step, extra)
            data.restore(dict(resume.data))
            checkpoints.prune()
            say(f"Resumes after step {step:,} of {config.total_steps:,}.")
            if step == config.total_steps:
                say("The run is complete. To train it further, raise --total_steps.")
        metrics = Metrics(
            folder.path,
            writers=config.writers,
            config=resume_rules.to_json(config),
            resume_step=resume.step,
            recorded=resume.recorded,
            unwritten=resume.unwritten,
            note=say,
        )
        stack.callback(metrics.close)
        progress = Progress(console, steps=config.total_steps, done=resume.step)
        stack.enter_context(progress)
        recorder = Recorder(
            config,
            mesh,
            metrics,
            progress,
            step=resume.step,
            skipped=int(state.skipped),
            seconds=resume.seconds,
        )
        run = Components(
            prepared, programs, data, evaluation, telemetry, checkpoints, metrics, recorder, stop
        )
        try:
            return _take_steps(run, resume.step, state)
        except NotWritten as error:
            # The disk that was full for the records is so for the checkpoint of this stop, too.
            raise (metrics.failure or error) from error.__cause__


class Components(NamedTuple):
    """What the steps of a run need."""

    prepared: Prepared
    programs: Programs
    data: Loader
    evaluation: Evaluation | None
    telemetry: Telemetry | None
    checkpoints: Checkpoints
    metrics: Metrics
    recorder: Recorder
    stop: Stop


def _take_steps(run: Components, step: int, state: State) -> Outcome:
    """Takes the steps after `step`; evaluates and saves where that is due."""
    config, recorder, telemetry = run.prepared.config, run.recorder, run.telemetry
    held_out: float | None = None
    stopped = False
    while step < config.total_steps and not stopped:
        microbatches = config.gradient_accumulation_steps
        batch = place(next(run.data), run.prepared.mesh, microbatches=microbatches)
        if telemetry is not None:
            telemetry.begin(step + 1, state, batch)
        state, report = run.programs.after(step)(state, batch)
        step += 1
        recorder.take(step, report)
        if telemetry is not None and (numbers := telemetry.end(step, state, report)):
            recorder.flush()
            recorder.take_telemetry(step, numbers, telemetry.warning(numbers))
            recorder.pause(step)
        if run.metrics.failure is not None:
            run.stop.request()
        stopped = run.stop.requested()
        evaluates = _is_due(step, config.evaluation.every, config.total_steps)
        saves = stopped or _is_due(step, config.checkpoint.every, config.total_steps)
        if not evaluates and not saves:
            continue
        recorder.flush()
        if run.evaluation and evaluates:
            held_out = run.evaluation.loss(state.params)
            recorder.take_held_out(step, held_out, run.evaluation.statistics)
        if saves:
            run.metrics.sync()
            records = run.metrics.recorded, run.metrics.unwritten
            resume = ResumeState(step, run.data.state(), recorder.seconds, *records)
            extra = resume_state.to_json(resume, config)
            run.checkpoints.save(step, state, extra, loss=held_out if evaluates else None)
        recorder.pause(step)
    recorder.flush()
    if run.metrics.failure is not None:
        run.checkpoints.wait()
        raise run.metrics.failure
    return Outcome(step, recorder.loss, held_out, stopped and step < config.total_steps)


def _say(console: "Console", text: str) -> None:
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def _compile_telemetry(
    prepared: Prepared, say: Callable[[str], None], example: Any
) -> Telemetry | None:
    """The telemetry of a run; None if nothing of it is in 8 bits."""
    begin = time.perf_counter()
    config, mesh, _, graph, abstract = prepared
    telemetry = Telemetry(config, graph, abstract, mesh, example)
    if telemetry.empty:
        say("Nothing of this run is in 8 bits: there is no telemetry.")
        return None
    say(f"Compiled the telemetry in {time.perf_counter() - begin:.1f} s.")
    return telemetry


def _is_due(step: int, every: int, last: int) -> bool:
    return every > 0 and (step == last or step % every == 0)
