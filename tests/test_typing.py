"""The package tells type checkers that it has types, and a user's program sees them."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import coat_jax

PACKAGE = Path(coat_jax.__file__).parent
PROGRAM = """
import coat_jax as coat
from coat_jax.optax import InPlaceOptimizer, fp8_adamw, in_place

optimizer: InPlaceOptimizer = in_place(fp8_adamw(1e-3))
storage = coat.Storage(group_size="128")
"""
CONFIG = """
[mypy]
follow_imports = silent
ignore_missing_imports = True
[mypy-jax.*]
follow_imports = skip
"""


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The names of the files in the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = f"import hatchling.build as b; b.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=PACKAGE.parent, check=True)
    (path,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


def test_the_wheel_is_marked_as_typed(wheel):
    assert "coat_jax/py.typed" in wheel


def test_the_wheel_has_all_that_commands_read(wheel):
    """All modules, and the configs that `coat train` finds by name."""
    modules = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*.py")}
    configs = {
        f"coat_jax/{path.parent.name}/{path.name}" for path in PACKAGE.parent.glob("configs/*.py")
    }
    assert "coat_jax/configs/llama_124m.py" in configs
    assert modules | configs <= wheel


def test_mypy_sees_the_types_in_a_users_program(tmp_path):
    """From outside the repository, without its configuration: the wrong argument is found."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    result = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={config}", str(program)],
        cwd=tmp_path,
        env={"MYPYPATH": str(PACKAGE.parent), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in result.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, result.stdout + result.stderr
    assert "program.py:6" in errors[0]
    assert 'Argument "group_size" to "Storage" has incompatible type "str"' in errors[0]
