"""The command lines of experiments."""

import sys
from types import SimpleNamespace

import pytest

from experiments.command import bare_parser_of


@pytest.mark.parametrize("module", ["experiments.ideas", "experiments.loss_study.__main__"])
def test_help_names_the_command_that_was_given(monkeypatch, module):
    called = SimpleNamespace(__spec__=SimpleNamespace(name=module))
    monkeypatch.setitem(sys.modules, "__main__", called)
    expected = f"usage: python -m {module.removesuffix('.__main__')} [-h]"
    assert bare_parser_of("").format_usage().strip() == expected


def test_a_script_has_the_name_of_its_file(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None))
    monkeypatch.setattr(sys, "argv", ["folder/script.py"])
    assert bare_parser_of("").format_usage() == "usage: script.py [-h]\n"
