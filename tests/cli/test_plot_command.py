"""`coat plot` draws runs, and says in one line why it cannot."""

import json
import shutil

import pytest

from coat_jax import cli


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [json.dumps({"step": i, "tokens": 8 * i, "loss": 3 / i}) for i in range(1, 9)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_it_says_what_it_wrote(tmp_path, run, capsys):
    out = tmp_path / "curves.png"
    asked = ["plot", str(run), "--out", str(out), "--over", "tokens", "--names", "a run"]
    assert cli.main([*asked, "--smooth", "2"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "--fp8", "error"], "no records of error: they are written when a run in FP8"),
        (
            ["{run}", "{run}", "--fp8", "error"],
            "A statistic of telemetry is drawn of one run, not of 2.",
        ),
        (["{run}", "--out", "plot.svg"], "plot.svg does not end in .png."),
        (["{run}", "--smooth", "0"], "--smooth: 0 must be 1 or more"),
        (["{run}", "{run}", "--names", "x"], "1 name for 2 runs: name all or none."),
        (["nowhere"], "There is no log of a run nowhere."),
        (["{run}", "--over", "time"], "has no losses over time: train the run, or plot it over st"),
        (["{run}", "--out", "{run}/no/folder/plot.png"], "No such file or directory"),
    ],
)
def test_an_error_that_a_user_can_fix_is_one_line(tmp_path, run, capsys, arguments, message):
    given = [argument.format(run=run) for argument in arguments]
    assert cli.main(["plot", *given]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said


def test_a_picture_lands_beside_what_it_shows(tmp_path, run, capsys, monkeypatch):
    """Of one run in its folder; of several, or of a file, in the folder that holds the first."""
    other = shutil.copytree(run, tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    for runs, place in (
        ([run], run),
        ([run / "metrics.jsonl"], run),
        ([run, other], tmp_path),
        (["run", "other"], tmp_path),
    ):
        assert cli.main(["plot", *map(str, runs)]) == 0
        assert capsys.readouterr().out.splitlines()[0] == str(place / "plot.png")
        (place / "plot.png").unlink()
