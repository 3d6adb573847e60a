"""Progress tells a person what matters, and a log nothing that garbles it."""

import io
import math
import re
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

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
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def show(steps, records, *, clock=None, seconds=0.0, done=0, terminal=False, width=80, **env):
    """What stands on a console after the records."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, height=25, _environ=env)
    if clock is not None:
        console.get_time = lambda: clock.now
    shown = Progress(console, steps=steps, done=done)
    with shown.bar:
        for record in records:
            shown.update(record)
            if clock is not None:
                clock.now += seconds
    return file.getvalue()


def last_screen(text):
    """What a terminal shows at the end, without colours."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return plain.rpartition("\r")[2].splitlines()


def test_a_log_has_plain_lines():
    text = show(100_000, [RECORD])
    assert text == (
        "step 12,000/100,000  loss 3.214  412,346 tokens/s  MFU 41.2%  61.3 GB  lr 0.00029\n"
    )


@pytest.mark.parametrize("width", [60, 120])
def test_a_terminal_has_all_within_its_width(width):
    records = [RECORD, RECORD | {"step": 24_000, "skipped": 12}]
    text = show(100_000, records, terminal=True, width=width)
    screen = last_screen(text)
    assert screen[0].startswith(" 24% ━")
    assert all(len(line.rstrip()) <= width for line in screen)
    shown = " ".join(" ".join(screen).split())
    for words in (" 24000/100000 ", "loss 3.214", "skipped 12", "412,346", "41.2%", "61.3 GB"):
        assert words in shown


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


@pytest.mark.parametrize(
    ("steps", "done", "taken", "seconds", "left"),
    [
        # The first step does not count: it waits for the compiler.
        (101, 0, (1, 21, 101), 20, [None, "0:01:20", None]),
        (100, 80, (81, 91), 10, [None, "0:00:09"]),  # resumed
        (30, 0, (1, 2), 100, [None, "0:46:40"]),
    ],
)
def test_the_time_left_is_that_of_the_last_steps(clock, steps, done, taken, seconds, left):
    clock.now += 500  # compiles
    records = [{"step": step} for step in taken]
    text = show(steps, records, clock=clock, seconds=seconds, done=done)
    found = [re.search(r"(\S+) left", line) for line in text.splitlines()]
    assert [match and match[1] for match in found] == left


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
    shown = Progress(console, steps=1000, done=0)
    with shown.bar:
        shown.update(RECORD)
        shown.note("saved [bold]step[/bold] 12,000 " + "x" * 80)
        shown.update({"step": 12_000, "held_out_loss": 3.25, "perplexity": 25.79})
        shown.update({"step": 13_000, "held_out_loss": 300.0, "perplexity": math.exp(300.0)})
        shown.note("a\x1b]0;title\x07b\x9b31m")
    text = file.getvalue()
    assert f"saved [bold]step[/bold] 12,000 {'x' * 80}" in text
    assert "step 12,000  held-out loss 3.2500  perplexity 25.79\n" in text
    assert "step 13,000  held-out loss 300.0000  perplexity 1.942e+130\n" in text
    assert r"a\x1b]0;title\x07b\x9b31m" in text
    assert "\x1b]" not in text
    assert "\x9b" not in text
