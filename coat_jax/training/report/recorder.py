"""Writes and shows the reports of steps as records, one step late.

The numbers of a report are fetched while the next step runs, so that the device never waits for the
host. docs/training.md lists the fields of a record.
"""

import math
import time

import jax
from jax.sharding import Mesh

from coat_jax.errors import UserError
from coat_jax.printable import counted
from coat_jax.training.config import TrainConfig
from coat_jax.training.report import speed
from coat_jax.training.report.metrics import Metrics
from coat_jax.training.report.progress import Progress
from coat_jax.training.step import Report


class Diverged(UserError):
    """Too many steps in a row had no finite loss and gradients."""

    exit_code = 4


class Recorder:
    """Takes a report after every step.

    Args:
        config: the run.
        mesh: its devices.
        metrics: where records are written.
        progress: where they are shown.
        step: how many were taken before this process began.
        skipped: how many of them had no finite loss and gradients.
        seconds: how long they took.

    Attributes:
        loss: of the last step that was recorded.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        metrics: Metrics,
        progress: Progress,
        *,
        step: int,
        skipped: int,
        seconds: float,
    ):
        self.loss = math.nan
        self._config, self._metrics, self._progress = config, metrics, progress
        self._device = mesh.local_devices[0]
        self._devices = mesh.size
        self._work = speed.work_per_token(config.model, config.sequence_length)
        self._work_in_bf16 = speed.work_per_token(config.at_start.model, config.sequence_length)
        self._peak_flops = speed.peak_flops_of(self._device.device_kind)
        self._waiting: tuple[int, Report] | None = None
        self._began = time.perf_counter() - seconds
        self._clock = (step, time.perf_counter())  # since when tokens_per_second is measured
        self._reported = (step, skipped)
        self._in_row = 0  # steps skipped one after the other, up to that report

    @property
    def seconds(self) -> float:
        """How long the run has taken so far, in this process and before it was resumed."""
        return time.perf_counter() - self._began

    def take(self, step: int, report: Report) -> None:
        """Records the report held back, and holds back this one if its step is to be logged."""
        self.flush()
        if step % self._config.log_every == 0 or step == self._config.total_steps:
            self._waiting = step, report

    def flush(self) -> None:
        """Records the report that `take` holds back; waits for its step to finish.

        Raises:
            Diverged: if too many steps in a row were skipped, or all steps of the run.
        """
        if self._waiting is None:
            return
        (step, report), self._waiting = self._waiting, None
        numbers = jax.tree.map(lambda x: x.item(), jax.device_get(report))
        loss, norm, rate, labels, skipped, metrics = numbers
        now = time.perf_counter()
        before, since = self._clock
        self._clock = step, now
        pace = (step - before) * self._config.tokens_per_step / (now - since)
        self.loss = loss
        record = {
            "loss": loss,
            **({"learning_rate": rate} if self._config.optimizer.follows_schedule else {}),
            "gradient_norm": norm,
            "labels": int(labels),
            "skipped": int(skipped),
            "tokens_per_second": pace,
            **metrics,
        }
        if self._peak_flops is not None:
            work = self._work_in_bf16 if step <= self._config.steps_in_bf16 else self._work
            record["mfu"] = speed.utilization(work, self._peak_flops, pace, self._devices)
        stats = self._device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            record["memory"] = stats["peak_bytes_in_use"]
        self._write(step, record)
        self._count_skipped(step, int(skipped))

    def take_held_out(self, step: int, loss: float) -> None:
        """Records the loss on held-out data."""
        perplexity = math.inf if loss >= 700 else math.exp(loss)
        self._write(step, {"held_out_loss": loss, "perplexity": perplexity})

    def take_telemetry(self, step: int, numbers: dict[str, float], warning: str | None) -> None:
        """Records what FP8 does to tensors; shows a warning, if there is one."""
        self._metrics.write(self._whole(step, numbers))
        if warning is not None:
            self._progress.note(f"step {step:,}: {warning}")

    def pause(self, step: int) -> None:
        """Leaves the time since the last step out of tokens_per_second."""
        self._clock = step, time.perf_counter()

    def _write(self, step: int, record: dict[str, float]) -> None:
        whole = self._whole(step, record)
        self._metrics.write(whole)
        self._progress.update(whole)

    def _whole(self, step: int, record: dict[str, float]) -> dict[str, float]:
        tokens = step * self._config.tokens_per_step
        return {"step": step, "tokens": tokens, "seconds": self.seconds, **record}

    def _count_skipped(self, step: int, skipped: int) -> None:
        """Counts skipped steps in a row; a series continues if all since the last report were."""
        (step_before, skipped_before), self._reported = self._reported, (step, skipped)
        continues = self._in_row > 0
        all_of_them = skipped - skipped_before == step - step_before
        self._in_row = self._in_row + step - step_before if all_of_them else 0
        if skipped > skipped_before and not (continues and all_of_them):
            self._progress.note(
                f"step {step:,}: since the last record {counted(skipped - skipped_before, 'step')} "
                f"had no finite loss and gradients, and {self._changed}; {skipped:,} so far."
            )
        nothing_learned = skipped == step == self._config.total_steps
        if self._in_row >= self._config.max_skipped_steps or nothing_learned:
            raise Diverged(
                f"The last {self._in_row:,} steps, up to step {step:,}, {self._changed}: their "
                f"losses or gradients are not finite. Lower {self._rate}, look at the data and at "
                "the records before, or allow more skipped steps with --max_skipped_steps."
            )

    @property
    def _changed(self) -> str:
        """What a step changes whose loss and gradients are not finite."""
        if self._config.optimizer.release_gradients:
            return "changed only layers whose gradients are finite"
        return "changed nothing"

    @property
    def _rate(self) -> str:
        """Where the learning rate is set."""
        if not self._config.optimizer.follows_schedule:
            return "the learning rate of optimizer.transformation"
        return f"--learning_rate ({self._config.optimizer.learning_rate:g})"
