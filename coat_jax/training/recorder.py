"""From the reports of steps to records: written, shown, and one step late.

A report's numbers are fetched when the next step is on its way, so that the device never waits for
the host. What a record has is in docs/training.md.
"""

import math
import time

import jax
from jax.sharding import Mesh

from coat_jax.training import speed
from coat_jax.training.config import TrainConfig
from coat_jax.training.metrics import Metrics
from coat_jax.training.progress import Progress
from coat_jax.training.step import Report


class Recorder:
    """Takes a report after every step.

    Args:
        config: the run.
        mesh: its devices.
        metrics: where records are written.
        progress: where they are shown.
        step: how many were taken before this process began.
        skipped: how many of them changed nothing.
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
        self._work = speed.work_per_token(config.model, config.sequence)
        self._peak = speed.peak_of(self._device.device_kind)
        self._waiting: tuple[int, Report] | None = None
        self._began = time.perf_counter() - seconds
        self._clock = (step, time.perf_counter())  # where the pace is measured from
        self._skipped = skipped

    @property
    def seconds(self) -> float:
        """How long the run has taken so far, all its processes one after the other."""
        return time.perf_counter() - self._began

    def take(self, step: int, report: Report) -> None:
        """Keeps this step's report, and records the one before."""
        self.flush()
        if step % self._config.log_every == 0 or step == self._config.steps:
            self._waiting = step, report

    def flush(self) -> None:
        """Records what is kept; waits for the step to finish."""
        if self._waiting is None:
            return
        (step, report), self._waiting = self._waiting, None
        loss, norm, rate, labels, skipped = (x.item() for x in jax.device_get(report))
        now = time.perf_counter()
        before, since = self._clock
        self._clock = step, now
        pace = (step - before) * self._config.tokens_per_step / (now - since)
        self.loss = loss
        self._note_skipped(step, int(skipped))
        record = {
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "labels": int(labels),
            "skipped": int(skipped),
            "tokens_per_second": pace,
        }
        if self._peak is not None:
            record["mfu"] = speed.utilization(self._work, self._peak, pace, self._devices)
        stats = self._device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            record["memory"] = stats["peak_bytes_in_use"]
        self._write(step, record)

    def take_held_out(self, step: int, loss: float) -> None:
        """Records the loss on held-out data."""
        perplexity = math.exp(loss) if loss < 700 else math.inf
        self._write(step, {"held_out_loss": loss, "perplexity": perplexity})

    def pause(self, step: int) -> None:
        """Takes what lies between the last step and now out of the pace."""
        self._clock = step, time.perf_counter()

    def _write(self, step: int, record: dict[str, float]) -> None:
        tokens = step * self._config.tokens_per_step
        whole = {"step": step, "tokens": tokens, "seconds": self.seconds, **record}
        self._metrics.write(whole)
        self._progress.update(whole)

    def _note_skipped(self, step: int, skipped: int) -> None:
        if skipped > self._skipped:
            self._progress.note(
                f"step {step:,}: its gradients are not finite. It changed nothing; {skipped:,} "
                "steps so far."
            )
        self._skipped = skipped
