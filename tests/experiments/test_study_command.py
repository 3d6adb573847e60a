"""The command line of studies that train: what is refused before anything is prepared."""

import argparse

import pytest

from experiments.loss_study import command


@pytest.mark.parametrize("plan", [[], ["--plan"]], ids=["run", "plan"])
def test_a_sequence_longer_than_the_context_is_refused(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "measure", pytest.fail)
    monkeypatch.setattr(command, "plan", pytest.fail)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, arms=["bf16"], work="study")
    given = ["--size", "tiny", "--sequence", "65", "--out", str(tmp_path), *plan]
    with pytest.raises(SystemExit, match=r"--sequence 65 .* context of size tiny, 64 tokens"):
        command.carry_out(parser.parse_args(given), "study.json", print)
