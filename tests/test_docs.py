"""The examples of the documentation work: Python runs, and commands take their arguments."""

import argparse
import ast
import dataclasses
import doctest
import functools
import importlib
import inspect
import json
import pkgutil
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest

import coat_jax
from coat_jax import cli, models
from coat_jax.models.hf.config import to_json
from coat_jax.training.config_files import SHIPPED, load_config
from coat_jax.training.optimizer import make_optimizer
from coat_jax.training.overrides import SYNONYM_OF, fields, override
from experiments.fine_tuning.study import STUDY as FINE_TUNING
from experiments.loss_study.study import STUDY as LOSS_STUDY
from experiments.stability.study import STUDY as STABILITY
from experiments.study.command import parser_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
SETTING = re.compile(r"[A-Z_]+=")  # of the environment, before a command
WITH_EXAMPLES = [page for page in reversed(PAGES) if "```python" in page.read_text()]
MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages(coat_jax.__path__, "coat_jax.")
    if not m.name.startswith("coat_jax.kernels.triton.")  # they need Triton, and have no examples
)
SOURCES = [
    *(str(path.relative_to(ROOT)) for path in PAGES),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "configs").glob("*.py"))),
    *(f"coat_jax/cli/{name}.py" for name in cli.COMMANDS),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "experiments").rglob("*.py"))),
]


@pytest.fixture(autouse=True)
def activations_stay() -> Iterator[None]:
    """A page adds to them."""
    with mock.patch.dict(coat_jax.ops.ACTIVATIONS):
        yield


@pytest.mark.costly
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_examples_of_a_page_run_in_order(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And every optimizer that a page makes takes a step, and every config is one.

    A `text` block after an example is what the example prints, without the lines "...".

    Code of other libraries stands in blocks marked `py`, which are left out.
    """
    downloaded = tmp_path / "Llama-3.1-8B"
    downloaded.mkdir()
    config = dataclasses.replace(models.config_of("tiny"), context=8192)
    (downloaded / "config.json").write_text(json.dumps(to_json(config, jnp.bfloat16)))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    pattern = r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?"
    for block, shown in re.findall(pattern, page.read_text(), flags=re.DOTALL):
        before = dict(names)
        capsys.readouterr()
        exec(compile(block, page.name, "exec"), names)
        printed = capsys.readouterr().out.splitlines()
        assert set(shown.splitlines()) - {"..."} <= set(printed)
        made = [value for name, value in names.items() if before.get(name) is not value]
        both = [value for value in made if isinstance(value, optax.LookaheadParams)]
        for value in made:
            if isinstance(value, optax.GradientTransformation):
                take_a_step(value, both[0] if both else names["params"])
            elif inspect.isfunction(value) and value.__name__ == "config":
                make_optimizer(value())


def take_a_step(tx: optax.GradientTransformation, params: Any) -> None:
    """Traces it, for the parameters that the page has."""
    trained = params.fast if isinstance(params, optax.LookaheadParams) else params
    jax.eval_shape(lambda: tx.update(trained, tx.init(params), params))


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_print_what_they_say(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


# --- Commands --------------------------------------------------------------------------------


class Command(NamedTuple):
    """A command line in a page or a docstring."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        """Without settings of the environment, and without the words that explain it."""
        command = re.split(r"\s{2,}", self.line.strip())[0]
        words = shlex.split(command)
        return [word for word in words if not SETTING.match(word)]


@functools.cache
def commands(program: str) -> list[Command]:
    """Every line of code in pages and docstrings that runs this program.

    Not those without arguments, those that leave something out, nor a worker for programs.
    """
    start = re.compile(rf"^(?:    |  )((?:[A-Z_]+=\S+ )*{program}\b.*)$|`({program}\b[^`]*)`", re.M)
    found = []
    for page in SOURCES:
        text = (ROOT / page).read_text()
        if page.endswith(".py"):
            text = ast.get_docstring(ast.parse(text)) or ""
        text = FENCED.sub(lambda block: "" if block[1] else indented(block[2]), text)
        for match in start.finditer(text):
            command = Command(page, match[1] or match[2])
            complete = "..." not in command.line and "saved_by_torch" not in command.line
            if complete and (len(command.words) > 2 or program == "make"):
                found.append(command)
    return found


def indented(lines: str) -> str:
    """As the other blocks of commands are."""
    return textwrap.indent(lines, "    ")


def named(command: Command) -> str:
    return f"{Path(command.page).name}: {' '.join(command.words)}"


def ready(config: str) -> str:
    """The config that a command names; any will do where it names none of ours."""
    return config if config.partition(":")[0] in SHIPPED else "llama_tiny"


@pytest.mark.parametrize("command", commands(f"coat (?:{'|'.join(cli.COMMANDS)})"), ids=named)
def test_a_command_of_coat_is_one_that_it_takes(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its arguments are read, and for `train` its config is made; nothing runs."""
    _, name, *arguments = command.words
    monkeypatch.chdir(ROOT)
    if name == "train" and arguments != ["--help"]:
        arguments = [ready(arguments[0]), *arguments[1:], "--print-config"]
    else:
        module = importlib.import_module(f"coat_jax.cli.{name}")
        monkeypatch.setattr(module, "run", lambda options: 0)
    try:
        code = cli.main([name, *arguments])
    except SystemExit as end:  # --help
        code = end.code
    assert code == 0, capsys.readouterr().err


PROGRAMS = rf"(?:coat (?:{'|'.join(cli.COMMANDS)})|make|pip install|python -m)"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_of_a_page_can_be_pasted(page: Path) -> None:
    """A shell reads the words that explain it as a comment."""
    for command in commands(PROGRAMS):
        if command.page == str(page.relative_to(ROOT)):
            pasted = shlex.split(command.line, comments=True)
            assert [word for word in pasted if not SETTING.match(word)] == command.words


@pytest.mark.parametrize("command", commands("python -m experiments"), ids=named)
def test_a_module_that_is_run_takes_its_arguments(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `main` is called until the arguments have been read."""
    _, _, name, *arguments = command.words
    entry = f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name
    main = importlib.import_module(entry).main
    stop_after_parsing(monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(Parsed):
        main()


class Parsed(Exception):
    """The arguments were read."""


def stop_after_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse(parser, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)


def options_of_commands() -> set[str]:
    """Of all commands, of launchers and of the studies of the loss, whose page names options."""
    found = {"--ntasks-per-node", "--beside-one"}
    for name in cli.COMMANDS.keys() - {"train"}:  # its options are the fields of a config
        parser = argparse.ArgumentParser()
        importlib.import_module(f"coat_jax.cli.{name}").add_arguments(parser)
        found |= {option for action in parser._actions for option in action.option_strings}
    for study in (LOSS_STUDY, FINE_TUNING, STABILITY):
        found |= {option for a in parser_of(study, "")._actions for option in a.option_strings}
    return found | {"--print-config", "--help-all", "--debug"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_an_option_in_a_sentence_exists(page: Path) -> None:
    """A field of a config is named by its path or its last part, and takes the value beside it."""
    config = load_config("vlm_tiny" if page.name == "vision.md" else "llama_tiny")
    known = {field.name for field in fields(config)}
    known |= {name.rsplit(".", 1)[-1] for name in known}
    known |= SYNONYM_OF.keys()
    options = options_of_commands()
    for option in re.findall(r"`(--[^`]+)`", page.read_text()):
        name, *values = re.split(r"[\s=]+", option)
        if name in options:
            continue
        assert name[2:] in known, option
        if values:
            override(config, [name, *values])


NAMES_OF_RUNS = ("config.json", "tokenizer.json", "generation_config.json", "tokens/tokens.json")
NAMES_OF_RUNS += ("manifest.json", "tokens/manifest.json")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_in_a_sentence_exist(page: Path) -> None:
    """A file by its path in the repository, the package or beside the one before it."""
    beside = [ROOT, ROOT / "coat_jax"]
    for words in re.findall(r"`([^`\n]+)`", page.read_text()):
        if re.fullmatch(r"[\w./]+\.(py|json|png|sh|yaml|sbatch)", words):
            if words in NAMES_OF_RUNS or words.startswith(("DIR/", "out/")):
                continue
            assert any((folder / words).exists() for folder in beside), words
            beside.append((ROOT / words).parent)
        elif re.fullmatch(r"coat(_jax)?(\.\w+)+", words):
            pkgutil.resolve_name(re.sub(r"^coat(_jax)?\.", "coat_jax.", words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_launch_files_of_pages_exist(page: Path) -> None:
    for words in re.findall(r"`((?:sbatch |kubectl \w+ -f )?launch/[^`]*)`", page.read_text()):
        for path in re.findall(r"(?:launch|configs)/[\w.]*", words):
            assert (ROOT / path).exists(), words


@pytest.mark.parametrize("command", commands("make"), ids=named)
def test_make_has_the_targets_that_pages_name(command: Command) -> None:
    for target in (word for word in command.words[1:] if "=" not in word):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


@pytest.mark.parametrize("command", commands("pip install"), ids=named)
def test_pip_installs_extras_that_exist(command: Command) -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    for extras in re.findall(r"\[([\w,]+)\]", " ".join(command.words)):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", declared, re.M), extra


PUBLIC = ["evaluation", "generation", "models", "nn", "ops", "optax", "quantization", "telemetry"]


@pytest.mark.parametrize("package", PUBLIC)
def test_the_reference_has_every_public_name(package: str) -> None:
    """A name that its module's file shares is named with that file: nn.convert.convert."""
    public = importlib.import_module(f"coat_jax.{package}").__all__
    page = (ROOT / f"docs/reference/{package}.md").read_text()
    if "members: false" not in page:
        assert f"::: coat_jax.{package}\n" in page
        return
    listed = re.findall(rf"^::: coat_jax\.{package}\.(?:\w+\.)*(\w+)$", page, re.M)
    elsewhere = re.findall(rf"`coat\.{package}\.(\w+)` is", page)
    assert sorted(listed + elsewhere) == sorted(public)


def test_pages_link_to_files_that_exist() -> None:
    for page in [*PAGES, *sorted((ROOT / "docs/reference").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
