"""Every figure in README, docs and the configs' docstrings agrees with what it comes from."""

import pytest

from experiments.figures.compare import ROOT, Given, Page, Sentence, Table, compare, documents
from experiments.figures.gpus import unnamed
from experiments.figures.measured.files import FOLDER, device, parents, record
from experiments.figures.pages import DECLARED, all_pages

PAGE = "docs/page.md"


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: page.name)
def test_every_figure_of_a_page_agrees_with_what_it_comes_from(page):
    _, errors = compare(page, (ROOT / page.name).read_text())
    assert not errors, "\n".join([*errors, "Run python -m experiments.figures --write."])


@pytest.mark.parametrize("name", documents())
def test_pages_name_the_gpus_that_results_are_of(name):
    assert list(unnamed((ROOT / name).read_text(), device)) == []


def test_a_gpu_that_results_are_not_of_is_an_error():
    devices = {"speed": "NVIDIA H200", "layer": "NVIDIA H100 80GB HBM3", "error": "cpu"}
    speed, layer, error = (f"[it](../experiments/results/{name}.json)" for name in devices)
    wrong = f"On an H100\nit is fast ({speed}, {layer})."
    assert list(unnamed(f"An H200.\n\n{wrong}\n", devices.get)) == [
        "names H100, but speed.json is of an H200"
    ]
    both = f"On an H200 ({speed}) and an H100 ({layer}), with errors of a CPU ({error})."
    nothing_named = f"It is fast ({speed})."
    table = f"| {speed} | H100 |"
    for right in (both, nothing_named, table):
        assert list(unnamed(right, devices.get)) == []


def test_every_declaration_is_of_a_page_that_exists():
    names = [page.name for page in DECLARED]
    assert len(set(names)) == len(names)
    assert set(names) <= set(documents())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_results_file_names_script_commit_and_hardware(path):
    made = parents(path.stem)
    script = ROOT / made["script"]
    assert script.exists() or script.with_suffix("").is_dir()  # a script may have become a folder
    assert len(made["commit"]) == 40
    assert made["hardware"]["device"]


def test_every_run_of_a_file_that_accumulates_names_commit_and_device():
    for run in record("loss_study")["runs"]:
        assert len(run["parents"]["commit"]) == 40
        assert run["parents"]["device"]


def compared(text, *figures):
    return compare(Page(PAGE, figures), text)


SPEED = Sentence("is {:.2f} times as fast", lambda: (1.5,))


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
def test_numbers_that_are_not_figures_need_no_parent(words):
    assert compared(f"{words}\n")[1] == []


def test_a_wrong_figure_is_reported_and_corrected_across_a_line_break():
    text, errors = compared("COAT is 1.62\ntimes as fast.\n", SPEED)
    assert errors == [f"{PAGE}: 1.62 should be 1.50 in {SPEED.pattern!r}"]
    assert text == "COAT is 1.50\ntimes as fast.\n"
    assert compared(text, SPEED)[1] == []


def test_a_declared_sentence_must_be_there_once():
    assert "0 times" in compared("Nothing.\n", SPEED)[1][0]
    twice = "It is 1.50 times as fast. It is 1.50 times as fast.\n"
    assert "2 times" in compared(twice, SPEED)[1][0]


def test_a_table_is_written_between_its_markers():
    table = Table("speed", lambda: [["", "ms"], ["ours", "1.5"]])
    empty = "<!-- table: speed -->\n<!-- end of table -->\n"
    text, errors = compared(empty, table)
    assert len(errors) == 1
    assert "| ours | 1.5 |" in text
    assert compared(text, table)[1] == []
    assert compared(text.replace("1.5", "1.6"), table)[1] != []


def test_a_given_figure_must_still_be_on_the_page():
    given = Given("waits 300 seconds", "a setting")
    assert compared("It waits 300\nseconds.\n", given)[1] == []
    assert "not there" in compared("It waits.\n", given)[1][0]
    assert len(compared("It waits 300 seconds, or 20 seconds.\n", given)[1]) == 1
