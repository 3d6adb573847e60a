"""Writes and shows the reports of steps as records, one step late.

The numbers of a report are fetched while the next step runs, so that the device never waits for the
host. docs/training.md lists the fields of a record.
"""

import math
import time
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from coat_jax.errors import UserError
from coat_jax.models.protocol import Work
from coat_jax.printable import amount
from coat_jax.training.config import TrainConfig
from coat_jax.training.config.optimizer import is_transformation
from coat_jax.training.families import family_of
from coat_jax.training.report.metrics import Metrics
from coat_jax.training.report.progress import Progress
from coat_jax.training.step import Report

# Floating-point operations a second by what a device's name contains, the more specific names
# first: in 16 bits and in FP8, dense, summed in FP32. From NVIDIA's data sheets.
PEAKS = {
    "H100 PCIe": (756e12, 1513e12),
    "H100 NVL": (835e12, 1671e12),
    "H100": (989e12, 1979e12),
    "H200 NVL": (835e12, 1671e12),
    "H200": (989e12, 1979e12),  # and GH200, whose name contains it
    "B200": (2250e12, 4500e12),
    "L40S": (362e12, 733e12),
    "L40": (181e12, 362e12),
    "L4": (121e12, 242e12),
    "RTX 4090": (165e12, 330e12),
    "A100": (312e12, 312e12),  # without FP8
}


class Diverged(UserError):
    """Too many steps in a row had no finite loss and gradients."""

    exit_code = 4


class Recorder:
    """Takes a report after every step; `loss` is that of the last step that was recorded.

    `step`, `skipped` and `seconds` are of the run before this process began.
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
        self._device, self._devices = mesh.local_devices[0], mesh.size
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
        """Records the report that `take` holds back; waits for its step to finish."""
        if self._waiting is None:
            return
        (step, report), self._waiting = self._waiting, None
        numbers = jax.tree.map(lambda x: x.item(), jax.device_get(report))
        self.loss, norm, rate, labels, skipped, metrics = numbers
        before, since = self._clock
        self.pause(step)
        pace = (step - before) * self._config.tokens_per_step / (self._clock[1] - since)
        config = self._config if step > self._config.steps_in_bf16 else self._config.bf16_phase
        work = family_of(config.model).work(config)
        record = {
            "loss": self.loss,
            "learning_rate": None if is_transformation(config.optimizer.transformation) else rate,
            "gradient_norm": norm,
            "labels": labels,
            "skipped": skipped,
            "tokens_per_second": pace,
            **metrics,
            "mfu": utilization(work, self._device.device_kind, pace, self._devices),
            "memory": (self._device.memory_stats() or {}).get("peak_bytes_in_use"),
        }
        record = {key: x for key, x in record.items() if x is not None}
        self._progress.update(self._write(step, record))
        self._count_skipped(step, skipped)

    def take_held_out(self, step: int, loss: float, statistics: Mapping[str, float]) -> None:
        """Records the loss on held-out data, and the statistics that came with it."""
        record = {"held_out_loss": loss}
        if family_of(self._config.model).is_text:
            record["perplexity"] = math.inf if loss >= 700 else math.exp(loss)
        record |= {f"held_out_{name}": value for name, value in statistics.items()}
        self._progress.update(self._write(step, record))

    def take_telemetry(self, step: int, numbers: dict[str, float], warning: str | None) -> None:
        """Records statistics of tensors in FP8; shows a warning, if there is one."""
        self._write(step, numbers)
        if warning is not None:
            self._progress.note(f"step {step:,}: {warning}")

    def pause(self, step: int) -> None:
        """Leaves the time since the last step out of tokens_per_second."""
        self._clock = step, time.perf_counter()

    def _write(self, step: int, numbers: dict[str, float]) -> dict[str, float]:
        """Writes a record, and returns it with the fields with which each begins."""
        tokens = step * self._config.tokens_per_step
        record = {"step": step, "tokens": tokens, "seconds": self.seconds, **numbers}
        self._metrics.write(record)
        return record

    def _count_skipped(self, step: int, skipped: int) -> None:
        """Counts skipped steps in a row; a series continues if all since the last report were."""
        (step_before, skipped_before), self._reported = self._reported, (step, skipped)
        in_row_before, new = self._in_row, skipped - skipped_before
        self._in_row = in_row_before + new if new == step - step_before else 0
        if new and not (in_row_before and self._in_row):
            self._progress.note(
                f"step {step:,}: skipped {amount(new, 'step')} since the last record, whose loss "
                f"or gradients are not finite; {skipped:,} so far."
            )
        nothing_learned = skipped == step == self._config.total_steps
        if self._in_row >= self._config.max_skipped_steps or nothing_learned:
            raise Diverged(
                f"The last {self._in_row:,} steps, up to step {step:,}, were skipped: their losses "
                "or gradients are not finite. Lower the learning rate, look at the data and at the "
                "records before, or allow more skipped steps with --max_skipped_steps."
            )


def utilization(
    work: Work | None, device_kind: str, tokens_per_second: float, devices: int
) -> float | None:
    """Returns the share of the peak FLOP/s; None if that or the work is not known, as for CPUs.

        MFU = tokens/s * (FP8 work / FP8 peak + other work / 16-bit peak) / devices

    so that 100 % means the same for every precision: as fast as the device can multiply.
    """
    peak = next((peak for name, peak in PEAKS.items() if name in device_kind), None)
    if work is None or peak is None:
        return None
    wide, fp8 = peak
    return tokens_per_second * (work.fp8 / fp8 + work.wide / wide) / devices
