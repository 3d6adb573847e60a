"""Signals that end a run: every process stops after the same step.

    with Stop() as stop:             the current step finishes before the run stops
        ... one step, on every process ...
        if stop.is_requested(): save, and leave

Ctrl-C interrupts at once, without saving. Python loses the KeyboardInterrupt if a signal arrives
while it collects garbage: `is_requested` then raises it again.
"""

import os
import signal
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils

# SLURM's --signal may send either of the first two; a terminal that is closed sends SIGHUP.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Stop:
    """Notices SIGTERM, SIGUSR1 and SIGHUP, and lets all processes stop at the same step.

    A run of one process remembers the signal. A run of several leaves it to JAX's preemption
    service, which receives SIGTERM on any process and agrees in the background, within seconds, on
    a step that no process has passed. Neither slows steps down. A SIGHUP that is ignored, as under
    `nohup`, stays ignored.
    """

    def __init__(self) -> None:
        self._several = jax.process_count() > 1
        self._asked = self._interrupted = False
        self._calls = 0

    def __enter__(self) -> Self:
        # Python must not take SIGTERM from the preemption service.
        caught = [number for number in SIGNALS if not self._several or number != signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            caught.remove(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._on_signal) for number in caught}
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_requested(self) -> bool:
        """Returns whether to stop after this step. Every process must ask, once in every step."""
        if self._interrupted:
            raise KeyboardInterrupt
        if self._several:
            self._calls += 1
            self._asked |= multihost_utils.reached_preemption_sync_point(self._calls)
        return self._asked

    def request(self) -> None:
        """Asks all processes to stop, as a signal does; any process may call it."""
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._asked = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        signal.default_int_handler(number, frame)
