"""Processes stop at the same step after a signal to one of them."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from forks import Fork
from processes import begin_all, line, lines, outputs

from coat_jax.training.cluster.stop import Stop

JOINED = Path(__file__).with_name("joined.py")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_one_process_notes_a_signal_and_continues(number):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), number)
        assert stop.requested()
        assert stop.requested()
    assert signal.getsignal(number) is before


def test_an_interrupt_that_python_lost_is_raised_again():
    """As in a callback of the garbage collector, which may raise nothing."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with Stop() as stop:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                stop.requested()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_nohup_ignores_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_can_be_requested_without_a_signal():
    with Stop() as stop:
        stop.request()
        assert stop.requested()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_one_process_stops_all_at_the_same_step(number):
    processes = begin_all([JOINED], 2, begin=Fork)
    joined = [line(process, "joined") for process in processes]
    assert joined == ["joined 0 of 2, sum 3", "joined 1 of 2, sum 3"]
    processes[1].send_signal(number)
    (first,), (second,) = (lines(text, "stopped after") for text in outputs(processes, code=143))
    assert first.replace("main True", "main False") == second
