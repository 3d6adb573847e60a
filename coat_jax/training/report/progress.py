"""The progress of a run, while it trains.

On a terminal, a bar that stays at the bottom:

     12% ━━━━            12000/100000 1:23:45 loss 3.214  412,346 tokens/s  MFU 41.2%  61.3 GB

Elsewhere, plain lines for a log: the first step, then every twentieth of the run or every minute,
and the last. Held-out losses always have a line of their own. The loss is smoothed: a mean that
weighs recent records most. Give processes other than the main one a quiet console.
"""

import datetime
import math
import time
from functools import partial

from rich import progress
from rich.console import Console
from rich.table import Column

from coat_jax.printable import printable
from coat_jax.training.report.metrics import Record

SMOOTHING = 0.9  # of the loss that is shown, from one record to the next
LINES = 20  # in the log of a short run
SECONDS_PER_LINE = 60.0  # in that of a long one
SPEED_PERIOD = 3600.0  # seconds from whose steps the time left is estimated
FIELDS = {
    "loss": "loss {:.3f}",
    "skipped": "skipped {:,}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "gigabytes": "{:.1f} GB",
    "learning_rate": "lr {:.2g}",
}


class Progress:
    """Shows the progress of a run; `done` of all `steps` were taken before.

    Attributes:
        bar: on a terminal, is drawn within `with`.
        note: prints a line that stays, above the bar.
    """

    def __init__(self, console: Console, *, steps: int, done: int) -> None:
        self.note, self._steps = partial(say, console), steps
        self._plain = not console.is_terminal or console.is_dumb_terminal
        self.bar = progress.Progress(
            progress.TaskProgressColumn(),
            progress.BarColumn(bar_width=16),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}", markup=False, table_column=Column()),
            console=console,
            speed_estimate_period=SPEED_PERIOD,
            disable=self._plain,
        )
        self._task = self.bar.add_task("", total=steps, completed=done)
        self._loss = math.nan
        self._line_step, self._line_time = -steps, -math.inf

    def update(self, record: Record) -> None:
        """Takes the metrics of a step; one with a held-out loss gets a line of its own."""
        step, loss = int(record["step"]), record.get("loss", math.nan)
        if "held_out_loss" in record:
            losses = f"held-out loss {record['held_out_loss']:.4f}"
            if "perplexity" in record:
                losses += f"  perplexity {record['perplexity']:.4g}"
            self.note(f"step {step:,}  {losses}")
            return
        if math.isfinite(loss):
            before = self._loss if math.isfinite(self._loss) else loss
            self._loss = SMOOTHING * before + (1 - SMOOTHING) * loss
        shown = {**record, "loss": self._loss, "gigabytes": record.get("memory", 0) / 1e9}
        state = "  ".join(form.format(shown[key]) for key, form in FIELDS.items() if shown.get(key))
        self.bar.update(self._task, completed=step, description=state)
        if self._plain and (
            step >= self._steps
            or (step - self._line_step) * LINES >= self._steps
            or time.monotonic() - self._line_time >= SECONDS_PER_LINE
        ):
            self._line_step, self._line_time = step, time.monotonic()
            left = self.bar.tasks[0].time_remaining
            ends = f"  {datetime.timedelta(seconds=left)} left" if left else ""
            self.note(f"step {step:,}/{self._steps:,}  {state}{ends}")


def say(console: Console, text: str) -> None:
    """Prints a line as it is, without control characters."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
