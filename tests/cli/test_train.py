"""`coat train`: bad input ends in one line and code 2, before anything is compiled or written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from coat_jax import cli, nvidia, writing
from coat_jax.cli.train import STOPPED
from coat_jax.errors import UserError
from coat_jax.training import loop
from coat_jax.training.cluster.communication import QUEUES
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


BAD = {
    "a config that is not there": (["nothing.py"], "There is no config file 'nothing.py'"),
    "a folder instead of a config": ([str(ROOT / "docs")], f"init_from={str(ROOT / 'docs')!r}."),
    "a field that does not exist": ([TINY, "--total_stepz", "3"], "Did you mean --total_steps?"),
    "settings without a config": (
        ["--total_steps", "3"],
        "A config comes before the settings, as in coat train llama_tiny --total_steps.",
    ),
    "a flag without a config": (
        ["--print-config"],
        "`coat train` alone lists those of the package",
    ),
    "a function without a config": ([":bf16"], "There is no config file ':bf16'"),
    "a cache without a name": ([TINY, "--cache", ""], "cache='' names no folder"),
    "a mesh that does not match": ([TINY, "--mesh.data", "3"], "needs 3 devices, and JAX finds 8"),
    "data that is missing": ([TINY, "--train", "nothing/*.npy"], "nothing/*.npy"),
    "a second moment that decays too fast": (
        [TINY, "--optimizer.b2", "0.5"],
        "optimizer.b2=0.5 is below 0.788943, the least beside optimizer.b1=0.9",
    ),
    "a folder whose name is not UTF-8": (
        [TINY, "--out", "out\udcff"],
        "has a name that is not UTF-8, and checkpoints need one that is",
    ),
    "a folder to begin from without a model": ([TINY, "--init_from", "."], "no config.json"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_code_2(train, tmp_path, arguments, message):
    mesh = [] if any("mesh" in a or "tensor" in a for a in arguments) else ["--mesh.fsdp", "8"]
    code, out, err = train(*arguments, *(mesh if TINY in arguments else []))
    assert code == 2
    assert message in err
    assert err.startswith("coat train: ")
    assert err.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_ends_the_program_is_named(train, tmp_path):
    (tmp_path / "leaving.py").write_text("def config():\n    raise SystemExit(3)\n")
    code, _, err = train("leaving.py")
    assert code == 2
    assert err == "coat train: leaving.py:2: SystemExit: 3\n"


@pytest.mark.parametrize(("dtype", "named"), [(np.uint16, "300"), (np.float32, "float32")])
def test_tokens_that_are_none_of_the_vocabulary_are_named(train, tmp_path, dtype, named):
    np.save(tmp_path / "tokens.npy", np.array([1, 2, 300] * 2000, dtype))
    data = ["--train", tmp_path / "tokens.npy", "--cache", "none"]
    code, _, err = train(TINY, "--mesh.fsdp", "8", *data)
    assert code == 2
    assert named in err
    assert "tokens.npy" in err


def test_a_full_disk_has_a_code_of_its_own(train, monkeypatch):
    def full(config, console):
        raise writing.DiskFull("The checkpoint of step 4 does not fit. What was saved is intact.")

    monkeypatch.setattr(loop, "train", full)
    code, _, err = train(TINY)
    assert code == 3
    assert err == "coat train: The checkpoint of step 4 does not fit. What was saved is intact.\n"


def test_exhausted_memory_says_what_to_lower(train, monkeypatch):
    def exhaust(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(loop, "_Run", exhaust)
    code, _, err = train(TINY, "--mesh.fsdp", "8")
    assert code == 2
    assert "memory is used up" in err
    assert "--precision coat_lean" in err


def test_a_run_that_was_stopped_says_so(train, monkeypatch):
    outcome = loop.Outcome(step=3, loss=1.0, held_out_loss=None, stopped=True)
    monkeypatch.setattr(loop, "train", lambda config, console: outcome)
    code, out, _ = train(TINY)
    assert code == 143
    assert "Stopped and saved after step 3." in out


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
def test_cuda_starts_with_one_queue_on_hoppers(train, monkeypatch, offload, queues):
    monkeypatch.setattr(nvidia, "query_gpus", lambda field: ["9.0"])
    monkeypatch.setenv(QUEUES, "")  # so that it is unset again after the test
    monkeypatch.delenv(QUEUES)
    found = []

    def note(*_):
        found.append(os.environ.get(QUEUES))
        return loop.Outcome(step=1, loss=1.0, held_out_loss=None, stopped=False)

    monkeypatch.setattr(loop, "train", note)
    train(TINY, "--optimizer.name", "fp8_adamw", "--optimizer.offload", offload)
    assert found == [queues]


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


def test_a_printed_config_can_be_run(train, tmp_path):
    _, out, _ = train(TINY, "--total_steps", "7", "--print-config")
    (tmp_path / "printed.py").write_text(out)
    assert load_config(str(tmp_path / "printed.py")).total_steps == 7


@pytest.mark.parametrize("name", SHIPPED)
def test_every_config_has_a_coat_and_a_bf16_variant(name):
    coat, bf16 = (load_config(f"{name}:{function}") for function in ("config", "bf16"))
    assert (coat.model.precision.fp8_linear, coat.optimizer.name) == (True, "fp8_adamw")
    assert (bf16.model.precision.fp8_linear, bf16.optimizer.name) == (False, "adamw")
    assert coat.out != bf16.out


def test_training_is_imported_when_it_is_asked_for():
    """`coat train --help` needs neither orbax nor grain."""
    program = """
import sys
from coat_jax.cli import main
try:
    main(["train", "--help"])
finally:
    sys.exit([name for name in ("orbax", "grain") if name in sys.modules] or 0)
"""
    subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
