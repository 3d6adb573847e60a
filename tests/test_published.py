"""The numbers and tables of the pages are those of the results files."""

import types

import pytest

from experiments.published.pages import PAGES, corrected
from experiments.published.results import FOLDER, record


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_what_its_results_files_say(page):
    text = page.read_text()
    assert corrected(text) == text, "Run python -m experiments.published --write."


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_results_file_names_its_commit_and_hardware(path):
    contents = record(path.stem)
    for made in [run["parents"] for run in contents.get("runs", [])] or [contents["parents"]]:
        assert len(made["commit"]) == 40
        assert made.get("device") or made["hardware"]["device"]


def test_numbers_and_tables_are_written_over_what_stands_there(monkeypatch):
    module = types.SimpleNamespace(
        speed_up=lambda size: {"7b": "1.62", "13b": "1.80"}[size],
        rows=lambda: [["", "ms"], ["ours", "1.5"]],
    )
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    page = (
        "COAT is **1.5<!-- a.speed_up 7b -->** times, or\n+2<!-- a.speed_up 13b --> times, so.\n"
        "<!-- table: a.rows -->\nold\n<!-- end of table -->\n"
    )
    right = corrected(page)
    assert "**1.62<!-- a.speed_up 7b -->** times, or\n1.80<!-- a.speed_up 13b -->" in right
    assert "<!-- table: a.rows -->\n|  | ms |\n| --- | --- |\n| ours | 1.5 |\n<!-- end" in right
    assert corrected(right) == right
