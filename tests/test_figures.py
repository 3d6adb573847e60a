"""Every figure in README, docs and the configs' docstrings agrees with what it comes from."""

import pytest

from experiments.figures import pages
from experiments.figures.given import GIVEN
from experiments.figures.pages import Given, Sentence, Table
from experiments.figures.results import FOLDER, parents, record
from experiments.figures.sentences import SENTENCES
from experiments.figures.tables import TABLES

PAGE = "docs/page.md"


@pytest.mark.parametrize("page", pages.names())
def test_every_figure_of_a_page_agrees_with_what_it_comes_from(page):
    text = (pages.ROOT / page).read_text()
    _, errors = pages.compare(page, text, SENTENCES, TABLES, GIVEN)
    assert not errors, "\n".join([*errors, "Run python -m experiments.figures --write."])


def test_every_declaration_is_of_a_page_that_exists():
    declared = {entry.page for entry in (*SENTENCES, *TABLES, *GIVEN)}
    assert declared <= set(pages.names())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_results_file_names_script_commit_and_hardware(path):
    made = parents(path.stem)
    script = pages.ROOT / made["script"]
    assert script.exists() or script.with_suffix("").is_dir()  # a script may have become a folder
    assert len(made["commit"]) == 40
    assert made["hardware"]["device"]


def test_every_run_of_a_file_that_accumulates_names_commit_and_device():
    for run in record("loss_study")["runs"]:
        assert len(run["parents"]["commit"]) == 40
        assert run["parents"]["device"]


def compared(text, *, sentences=(), tables=(), given=()):
    return pages.compare(PAGE, text, sentences, tables, given)


SPEED = Sentence(PAGE, "is {:.2f} times as fast", lambda: (1.5,))


@pytest.mark.parametrize(
    "figure",
    [
        "3.06 times smaller",
        "takes 20 ms",
        "1.4 to 1.6 times",
        "0.28 % above",
        "14,316 (batch 10)",
        "a thousand times",
        "a loss of 1.642",
        "in 72 GB",
        "saves 8 U",
        "| 24,547 |",
    ],
)
def test_a_figure_that_nobody_declared_is_found(figure):
    _, errors = compared(f"It is so: {figure}.\n")
    assert len(errors) == 1
    assert "no parent" in errors[0]


@pytest.mark.parametrize(
    "words",
    [
        "`--timeout 20 ms`",
        "```\n1.5 times\n```",
        "    coat train --learning_rate 1.5\n",
        "[4 GPUs](results_1.5.json)",
        "Llama-2-7B with 32 layers",
        "2^28 parameters",
    ],
)
def test_what_is_no_figure_needs_no_parent(words):
    assert compared(f"{words}\n")[1] == []


def test_a_wrong_figure_is_reported_and_corrected_across_a_line_break():
    text, errors = compared("COAT is 1.62\ntimes as fast.\n", sentences=[SPEED])
    assert errors == [f"{PAGE}: 1.62 should be 1.50 in {SPEED.pattern!r}"]
    assert text == "COAT is 1.50\ntimes as fast.\n"
    assert compared(text, sentences=[SPEED])[1] == []


def test_a_declared_sentence_must_be_there_once():
    assert "0 times" in compared("Nothing.\n", sentences=[SPEED])[1][0]
    twice = "It is 1.50 times as fast. It is 1.50 times as fast.\n"
    assert "2 times" in compared(twice, sentences=[SPEED])[1][0]


def test_a_table_is_written_between_its_markers():
    table = Table(PAGE, "speed", lambda: [["", "ms"], ["ours", "1.5"]])
    empty = "<!-- table: speed -->\n<!-- end of table -->\n"
    text, errors = compared(empty, tables=[table])
    assert len(errors) == 1
    assert "| ours | 1.5 |" in text
    assert compared(text, tables=[table])[1] == []
    assert compared(text.replace("1.5", "1.6"), tables=[table])[1] != []


def test_what_is_given_must_still_be_on_the_page():
    given = [Given(PAGE, "waits 300 seconds", "a setting")]
    assert compared("It waits 300\nseconds.\n", given=given)[1] == []
    assert "not there" in compared("It waits.\n", given=given)[1][0]
    assert len(compared("It waits 300 seconds, or 20 seconds.\n", given=given)[1]) == 1
