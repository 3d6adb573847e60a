"""Every example runs as its docstring says, on four devices.

A test takes some ten seconds: a process imports another trainer, and trains with and without
coat_jax.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import quick

ROOT = Path(__file__).parents[2]
NEEDS = {
    "flax_nnx": "flax",
    "flax_linen": "flax",
    "flax_lora": "flax",
    "equinox_loop": "equinox",
    "equinox_saved": "equinox",
    "flax_saved": "flax",
    "qwix_provider": "qwix",
    "tunix_trainer": "tunix",
    "maxtext_saved": "maxtext",
    "maxtext_train": "maxtext",
    "hugging_face": "transformers",
}
NO_EXAMPLES = {"__init__", "check"}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} - NO_EXAMPLES == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 150


@pytest.mark.examples
@pytest.mark.parametrize("name", NEEDS)
def test_an_example_trains_alike_with_fp8(name: str, tmp_path: Path) -> None:
    """The example asserts it itself, and prints both losses."""
    pytest.importorskip(NEEDS[name], reason=f"{name} needs {NEEDS[name]}")
    if name == "hugging_face":
        pytest.importorskip("torch")
    # In rare cases XLA's CPU devices begin two collectives in different orders and wait for each
    # other, until XLA ends the process.
    for _ in range(3):
        run = _run(name, tmp_path)
        if "Termination timeout for `all" not in run.stderr:
            break
    assert run.returncode == 0, run.stderr[-4000:]
    assert "4 device(s)" in run.stdout
    assert "with coat_jax" in run.stdout


def _run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"examples.{name}"],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": f"{quick.FLAGS} --xla_force_host_platform_device_count=4",
            # XLA's threads. A collective blocks one, and each device may have several at once.
            "NPROC": "16",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def test_a_missing_package_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "equinox.py").write_text("raise ModuleNotFoundError(name='equinox')")
    run = subprocess.run(
        [sys.executable, "-m", "examples.equinox_loop"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    (line,) = [line for line in run.stderr.splitlines() if "equinox" in line]
    assert line.startswith("This example needs the package 'equinox'")
    assert "Traceback" not in run.stderr
