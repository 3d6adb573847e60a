"""Progress tells a person what matters, and a log nothing that garbles it."""

import io
import math
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from coat_jax.training.report import progress
from coat_jax.training.report.progress import Progress

RECORD = {
    "step": 12_000,
    "loss": 3.214,
    "tokens_per_second": 412_345.6,
    "mfu": 0.4123,
    "memory": 61_312_345_678,
    "learning_rate": 2.93e-4,
    "skipped": 0,
}


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when told to."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    return clock


def show(steps, records, *, clock=None, seconds=0.0, terminal=False, width=80, **environment):
    """What stands on a console after the records."""
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, width=width, height=25, _environ=environment
    )
    with Progress(console, steps=steps, done=0, tokens_per_step=131_072) as shown:
        for record in records:
            shown.update(record)
            if clock is not None:
                clock.now += seconds
    return file.getvalue()


def last_screen(text):
    """The two lines that a terminal shows at the end, without colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "").splitlines()[-2:]


def test_a_log_has_no_control_codes_and_fits_80_columns():
    text = show(100_000, [RECORD])
    assert text == (
        "step 12,000/100,000  loss 3.214  412k tokens/s  MFU 41.2%  61.3 GB  lr 0.00029\n"
    )
    assert len(text) <= 81


def test_a_terminal_has_two_lines_of_80_columns_at_most():
    records = [RECORD, RECORD | {"step": 24_000, "skipped": 12}]
    text = show(100_000, records, terminal=True)
    where, how = last_screen(text)
    assert where.startswith(" 24% ━")
    assert "step 24,000/100,000  3.15B tokens" in where
    assert how.startswith("loss 3.214  skipped 12  412k tokens/s  MFU 41.2%  61.3 GB")
    assert len(where) <= 80
    assert len(how.rstrip()) <= 80


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("width", [28, 36, 40])
def test_a_narrow_console_leaves_out_the_least_important(terminal, width):
    text = show(100_000, [RECORD], terminal=terminal, width=width)
    shown = last_screen(text)
    assert all(len(line.rstrip()) <= width for line in shown)
    assert "step 12,000/100,000" in "".join(shown)
    assert "…" not in text  # cut off
    assert "lr" not in text


def test_a_dumb_terminal_gets_plain_lines():
    text = show(10, [RECORD | {"step": 1}], terminal=True, TERM="dumb")
    assert text.startswith("step 1/10  loss 3.214")
    assert "\x1b" not in text


def test_a_log_has_some_twenty_lines_or_a_line_a_minute(clock):
    text = show(400, [RECORD | {"step": i} for i in range(1, 401)], clock=clock, seconds=0.1)
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in text.splitlines()]
    assert steps == [*range(1, 400, 20), 400]
    records = [RECORD | {"step": i} for i in range(1, 1001)]
    text = show(1_000_000, records, clock=clock, seconds=1.0)
    assert len(text.splitlines()) == 17  # 1000 seconds


def test_the_time_left_does_not_count_compiling(clock):
    file = io.StringIO()
    shown = Progress(Console(file=file, width=80), steps=101, done=0, tokens_per_step=1)
    clock.now += 500  # compiles
    for step in (1, 21, 101):
        shown.update({"step": step})
        clock.now += 20
    first, second, last = file.getvalue().splitlines()
    assert "left" not in first
    assert "0:01:20 left" in second
    assert "left" not in last


def test_a_resumed_run_counts_its_own_steps(clock):
    file = io.StringIO()
    shown = Progress(Console(file=file, width=80), steps=100, done=80, tokens_per_step=1)
    for step in (81, 91):
        shown.update({"step": step})
        clock.now += 10
    assert "0:00:09 left" in file.getvalue().splitlines()[-1]


def test_the_loss_is_smoothed_and_what_is_not_finite_left_out():
    records = [{"step": i, "loss": loss} for i, loss in enumerate((4.0, math.nan, 4.0, 2.0), 1)]
    lines = show(4, records).splitlines()
    assert [re.search(r"loss (\S+)", line)[1] for line in lines[:3]] == ["4.000"] * 3
    assert 2.0 < float(re.search(r"loss (\S+)", lines[3])[1]) < 4.0


@pytest.mark.parametrize("terminal", [False, True])
def test_notes_and_held_out_losses_stay(terminal):
    """A note cannot control the terminal, and a huge perplexity is a power of ten."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, _environ={})
    with Progress(console, steps=1000, done=0, tokens_per_step=1) as shown:
        shown.update(RECORD)
        shown.note("saved [bold]step[/bold] 12,000 " + "x" * 80)
        shown.update({"step": 12_000, "held_out_loss": 3.25, "perplexity": 25.79})
        shown.update({"step": 13_000, "held_out_loss": 300.0, "perplexity": math.exp(300.0)})
        shown.note("a\x1b]0;title\x07b\x9b31m")
    text = file.getvalue()
    assert f"saved [bold]step[/bold] 12,000 {'x' * 80}" in text
    assert "step 12,000  held-out loss 3.2500  perplexity 25.79\n" in text
    assert "step 13,000  held-out loss 300.0000  perplexity 1.94e+130\n" in text
    assert r"a\x1b]0;title\x07b\x9b31m" in text
    assert "\x1b]" not in text
    assert "\x9b" not in text


def test_numbers_and_durations_are_short():
    numbers = (0, 999, 1234, 999_999, 1.5e9, 2e13)
    assert list(map(progress._short, numbers)) == ["0", "999", "1.23k", "1M", "1.5B", "20T"]
    assert progress._duration(59.6) == "0:01:00"
    assert progress._duration(90_000) == "1 day, 1:00:00"
