"""A repository of a few files, in which pretended measurements run."""

import shutil
from pathlib import Path

from experiments import measured_code

EXPERIMENTS = Path(measured_code.__file__).parent
COPIED = (
    "__init__",
    "compilation",
    "essence",
    "machine",
    "measured_cases",
    "measured_code",
    "workers",
)

FILES = {
    "coat_jax/__init__.py": '__version__ = "1"\n',
    "coat_jax/ran.py": """
import functools
from functools import partial

from coat_jax.constants import WIDTH

class Layer:
    def __init__(self):
        self.width = WIDTH

def ran():
    def inner():
        return Layer()
    cached()
    return inner()

def ran_in_a_worker():
    return 1

def did_not_run():
    return 2

def register(function):
    return None

@register
def decorated():
    return 3

@functools.cache
def cached():
    return 4

@functools.lru_cache(8)
def cached_but_not_run():
    return 5

@partial(functools.cache)
def wrapped_but_not_run():
    return 7
""",
    "coat_jax/constants.py": "WIDTH = 8\n\ndef did_not_run():\n    return 1\n",
    "coat_jax/config.py": "LAYERS = 2\n",
    "coat_jax/not_imported.py": "WIDTH = 8\n",
}


def make(root: Path) -> Path:
    """Writes the repository."""
    for name, source in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(source)
    (root / "experiments").mkdir()
    for name in COPIED:
        shutil.copy(EXPERIMENTS / f"{name}.py", root / "experiments")
    return root


def change(root: Path, file: str, before: str, after: str) -> None:
    """Replaces what stands in a file once."""
    source = (root / file).read_text()
    assert source.count(before) == 1
    (root / file).write_text(source.replace(before, after))
