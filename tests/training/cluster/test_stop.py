"""A process notes a signal and goes on; test_two_processes.py sees several stop together."""

import contextlib
import os
import signal

import pytest

from coat_jax.training.cluster.stop import Stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_one_process_notes_a_signal_and_continues(number):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert not stop.is_requested()
        os.kill(os.getpid(), number)
        assert stop.is_requested()
    assert signal.getsignal(number) is before
    with Stop() as stop:
        stop.request()
        assert stop.is_requested()


def test_an_interrupt_that_python_lost_is_raised_again():
    """As in a callback of the garbage collector, which may raise nothing."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with Stop() as stop:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                stop.is_requested()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_requested()
    finally:
        signal.signal(signal.SIGHUP, before)
