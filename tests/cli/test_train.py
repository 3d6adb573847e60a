"""`coat train`: bad input ends in one line and code 2, before anything is compiled or written."""

import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from coat_jax import cli, writing
from coat_jax.cli.train import STOPPED
from coat_jax.errors import UserError
from coat_jax.training import compilation, loop
from coat_jax.training.compilation import QUEUES
from coat_jax.training.config_files import SHIPPED, load_config
from coat_jax.training.report.recorder import Diverged

ROOT = Path(__file__).parent.parent.parent
TINY = str(ROOT / "tests" / "training" / "tiny_run.py")


@pytest.fixture
def train(tmp_path, capsys, monkeypatch):
    """Runs `coat train` with arguments; its code, what it printed, and what it said of errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = cli.main(["train", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nothing.py", "There is no config file 'nothing.py'"),
        (":bf16", "There is no config file ':bf16'"),
        (f"{ROOT}/docs", "docs is a folder: name the config file itself"),
        ("--total_steps 3", "There is no config file '--total_steps'"),
        ("--print-config", "`coat train` alone lists those that come with the package"),
        ("TINY --total_stepz 3", "Did you mean --total_steps?"),
        ("TINY --cache=", "cache='' names no folder"),
        ("TINY --mesh.data 3 --mesh.fsdp 1", "needs 3 devices, and JAX finds 8"),
        ("TINY --train nothing/*.npy", "nothing/*.npy"),
        ("TINY --b2 0.5", "b2=0.5 is below 0.788943, the least beside optimizer.b1=0.9"),
        ("TINY --out out\udcff", "has a name that is not UTF-8, and checkpoints need one"),
        ("TINY --init_from .", "no config.json"),
    ],
)
def test_bad_input_is_one_line_and_code_2(train, tmp_path, line, message):
    code, out, err = train(*line.replace("TINY", f"{TINY} --mesh.fsdp 8").split())
    assert code == 2
    assert message in err
    assert err.startswith("coat train: ")
    assert err.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("dtype", "named"), [(np.uint16, "300"), (np.float32, "float32")])
def test_tokens_that_are_none_of_the_vocabulary_are_named(train, tmp_path, dtype, named):
    np.save(tmp_path / "tokens.npy", np.array([1, 2, 300] * 2000, dtype))
    data = ["--train", tmp_path / "tokens.npy", "--cache", "none"]
    code, _, err = train(TINY, "--mesh.fsdp", "8", *data)
    assert code == 2
    assert named in err
    assert "tokens.npy" in err


# --- How a run ends --------------------------------------------------------------------------


def test_a_full_disk_has_a_code_of_its_own(train, monkeypatch):
    def full(config, console):
        raise writing.DiskFull("It does not fit.")

    monkeypatch.setattr(loop, "train", full)
    assert train(TINY) == (3, "", "coat train: It does not fit.\n")


def test_exhausted_memory_says_what_to_lower(train, monkeypatch):
    def exhaust(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(loop, "_Run", exhaust)
    code, _, err = train(TINY, "--mesh.fsdp", "8")
    assert code == 2
    assert "memory is used up" in err
    assert "--precision coat_lean" in err


@pytest.mark.parametrize(("saved", "said"), [(2, "continues after step 2,"), (None, "begins anew")])
def test_an_interrupted_run_says_where_it_continues(train, tmp_path, monkeypatch, saved, said):
    def interrupt(config, console):
        if saved:
            (tmp_path / config.out / "checkpoints" / str(saved) / "state").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", interrupt)
    code, out, err = train(TINY, "--out", "out")
    assert (code, err) == (cli.INTERRUPTED, "coat train: interrupted\n")
    assert f"The same command {said}" in out


@pytest.mark.parametrize(("offload", "queues"), [("false", "1"), ("true", None)])
def test_a_run_that_was_stopped_says_so_and_had_one_queue_on_hoppers(
    train, monkeypatch, offload, queues
):
    found = []

    def stop(*_):
        found.append(os.environ.get(QUEUES))
        return loop.Outcome(step=3, loss=1.0, held_out_loss=None, stopped=True)

    monkeypatch.setattr(compilation, "query_gpus", lambda field: ["9.0"])
    monkeypatch.setenv(QUEUES, "")  # so that it is unset again after the test
    monkeypatch.delenv(QUEUES)
    monkeypatch.setattr(loop, "train", stop)
    code, out, _ = train(TINY, "--optimizer.offload", offload)
    assert (code, found) == (143, [queues])
    assert "Stopped and saved after step 3." in out


# --- What is printed instead -----------------------------------------------------------------


def test_help_explains_the_fields_with_their_values(train):
    code, out, _ = train(TINY, "--learning_rate", "5e-3", "--help")
    assert code == 0
    assert out.startswith(f"usage: coat train {TINY} [--field value ...] [--print-config]")
    assert "--optimizer.learning_rate 0.005" in out
    assert "--optimizer.eps" not in out
    for arguments in ([TINY, "--help-all"], ["--help-all"]):
        code, out, _ = train(*arguments)
        assert code == 0
        assert "--optimizer.eps 1e-08" in out


def test_the_documentation_has_the_exit_codes_that_there_are():
    explained = cli.train.__doc__.partition("exit codes:")[2].splitlines()
    codes = {int(line.split()[0]) for line in explained if line.strip()[:1].isdigit()}
    ends = {0, 1, UserError.exit_code, writing.DiskFull.exit_code, Diverged.exit_code}
    assert codes == {*ends, cli.INTERRUPTED, STOPPED}
    page = (ROOT / "docs" / "training.md").read_text()
    assert all(f"| {code} |" in page for code in codes)


def test_without_a_config_those_there_are_are_listed(train):
    code, out, _ = train()
    assert code == UserError.exit_code
    for name, path in SHIPPED.items():
        title = path.read_text().splitlines()[0].removeprefix('"""')
        assert re.search(rf"^  {name} +{re.escape(title)}$", out, re.M)


def test_a_config_is_found_by_its_name_in_any_folder(train, tmp_path):
    (tmp_path / "llama_tiny").mkdir()  # as a run's folder may be called
    for name in ("llama_tiny", "llama_tiny:bf16"):
        code, out, _ = train(name, "--total_steps", "7", "--print-config")
        assert code == 0
        assert "total_steps=7" in out
    assert train("llama_tyni")[2].count("Did you mean llama_tiny?") == 1
    assert train("configs/llama_tiny.py")[2].count("Did you mean llama_tiny?") == 1


@pytest.mark.parametrize("name", SHIPPED)
def test_every_config_has_a_coat_and_a_bf16_variant(name):
    coat, bf16 = (load_config(f"{name}:{function}") for function in ("config", "bf16"))
    assert (coat.model.precision.fp8_linear, coat.optimizer.name) == (True, "fp8_adamw")
    assert (bf16.model.precision.fp8_linear, bf16.optimizer.name) == (False, "adamw")
    assert coat.out != bf16.out
