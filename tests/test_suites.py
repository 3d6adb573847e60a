"""Suites are chosen by marks, and modules by their names."""

from pathlib import Path

import pytest
from suites import ENDINGS

TESTS = Path(__file__).parent
SHARED = {"compiled": "COMPILED", "interpret": "interpreted.MARKS"}  # lists of marks
MODULES = [
    path.relative_to(TESTS)
    for path in sorted(TESTS.rglob("test_*.py"))
    if path.stem.rpartition("_")[2] in ENDINGS
]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_named_after_a_suite_marks_all_its_tests(module: Path):
    """Other suites leave the module out, so a test without the mark would run in none."""
    text = (TESTS / module).read_text("utf-8")
    _, found, marks = text.partition("\npytestmark = ")
    assert found
    mark = ENDINGS[module.stem.rpartition("_")[2]]
    marks = marks.partition("\n\n")[0]
    assert f"pytest.mark.{mark}" in marks or marks.strip() == SHARED.get(mark)
