"""Every Python example in the documentation runs, and every docstring's says what it prints."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import coat_jax

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_EXAMPLES = [page for page in PAGES if "```python" in page.read_text()]
MODULES = sorted(m.name for m in pkgutil.walk_packages(coat_jax.__path__, "coat_jax."))


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_examples_of_a_page_run_in_order(page: Path) -> None:
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_print_what_they_say(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0
