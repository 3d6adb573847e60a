"""The progress of a run, while it trains.

On a terminal, two lines that stay at the bottom:

     12% ━━━━━━━━━━━━━━━                        step 12,000/100,000  1.57B tokens  1:23:45 left
    loss 3.214  412k tokens/s  MFU 41.2%  61.3 GB  lr 0.00029

Elsewhere, plain lines for a log: the first step, then every twentieth of the run or every minute,
and the last. Held-out losses always have a line of their own. Fields that do not fit the width are
left out, the least important first. The loss is smoothed: a mean that weighs recent records most.
Give processes other than the main one a quiet console.
"""

import datetime
import math
import time
from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coat_jax.printable import printable
from coat_jax.training.report.writers import Record

SMOOTHING = 0.9  # of the loss that is shown, from one record to the next
LINES = 20  # in the log of a short run
SECONDS_PER_LINE = 60.0  # in that of a long one
READABLE = 1e6  # a larger perplexity is shown as a power of ten


class Progress:
    """Shows the progress of a run within `with`.

    Args:
        console: where to; rich knows whether it is a terminal.
        steps: of the whole run.
        done: how many of them were taken before this process began.
        tokens_per_step: in all processes.
    """

    def __init__(self, console: Console, *, steps: int, done: int, tokens_per_step: int) -> None:
        self._console, self._steps = console, steps
        self._step, self._tokens_per_step = done, tokens_per_step
        self._loss, self._weight = 0.0, 0.0  # an exponential mean, and the sum of its weights
        self._shown: dict[str, Any] = {}
        # The first step of this process and when it ended: what follows is extrapolated from there.
        self._clock: tuple[int, float] | None = None
        self._line_step, self._line_time = -steps, -math.inf
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._view, console=self._console, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:  # the last state stays on the screen
            self._live.stop()
            self._live = None

    def update(self, record: Record) -> None:
        """Takes the metrics of a step; one with a held-out loss gets a line of its own."""
        now = time.monotonic()
        self._step = int(record["step"])
        self._shown |= record
        loss = record.get("loss")
        if isinstance(loss, int | float) and math.isfinite(loss):
            self._loss = SMOOTHING * self._loss + (1 - SMOOTHING) * loss
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        if self._clock is None:
            self._clock = self._step, now
        if "held_out_loss" in record:
            self.note(_held_out(record))
        elif self._live is None and self._is_due(now):
            self._line_step, self._line_time = self._step, now
            self.note(self._line())

    def note(self, text: str) -> None:
        """Prints a line that stays, above the others."""
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def _is_due(self, now: float) -> bool:
        return (
            self._step >= self._steps
            or (self._step - self._line_step) * LINES >= self._steps
            or now - self._line_time >= SECONDS_PER_LINE
        )

    def _view(self) -> RenderableType:
        """The two lines of a terminal."""
        width = min(self._console.width, 80)
        tokens = f"{_short(self._step * self._tokens_per_step)} tokens"
        place = _fit([self._place(), tokens, self._left()], width - 8)
        total = max(self._steps, 1)
        top = Table.grid(padding=(0, 1))
        top.add_row(
            f"{self._step / total:4.0%}",
            ProgressBar(total=total, completed=self._step, width=max(width - len(place) - 6, 1)),
            Text(place, no_wrap=True),
        )
        return Group(top, Text(_fit(self._state(), width), no_wrap=True))

    def _line(self) -> str:
        """The line of a log."""
        loss, *others = self._state()
        return _fit([self._place(), loss, self._left(), *others], self._console.width)

    def _place(self) -> str:
        return f"step {self._step:,}/{self._steps:,}"

    def _left(self) -> str:
        """The time left, from the steps after this process's first one."""
        if self._clock is None or not self._clock[0] < self._step < self._steps:
            return ""
        step, begin = self._clock
        seconds = (time.monotonic() - begin) * (self._steps - self._step) / (self._step - step)
        return f"{_duration(seconds)} left"

    def _state(self) -> list[str]:
        """Fields of the last records, the most important first; empty where a value is missing."""
        shown = self._shown
        return [
            f"loss {self._loss / self._weight:.3f}" if self._weight else "",
            f"skipped {shown['skipped']:,}" if shown.get("skipped") else "",
            f"{_short(shown['tokens_per_second'])} tokens/s"
            if "tokens_per_second" in shown
            else "",
            f"MFU {shown['mfu']:.1%}" if "mfu" in shown else "",
            f"{shown['memory'] / 1e9:.1f} GB" if "memory" in shown else "",
            f"lr {shown['learning_rate']:.2g}" if "learning_rate" in shown else "",
        ]


def _held_out(record: Record) -> str:
    perplexity = ""
    if "perplexity" in record:
        value = float(record["perplexity"])
        perplexity = f"  perplexity {value:{'.2f' if value < READABLE else '.2e'}}"
    return f"step {record['step']:,}  held-out loss {record['held_out_loss']:.4f}{perplexity}"


def _fit(parts: Sequence[str], width: int) -> str:
    """Joins as many of the parts as fit, from the first on."""
    line = ""
    for part in filter(None, parts):
        longer = f"{line}  {part}" if line else part
        if len(longer) > width:
            break
        line = longer
    return line


def _short(number: float) -> str:
    """1234567 is 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:  # which three digits round to 1
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds; days where there are any."""
    return str(datetime.timedelta(seconds=round(seconds)))
