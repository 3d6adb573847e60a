"""Figures in README, docs and the docstrings of configs, each checked against what it comes from.

    python -m experiments.figures            reports figures that differ from their results files
    python -m experiments.figures --write    corrects them in the pages

Each page has a module in `pages/`, which declares its figures in one of three ways:

    Sentence    part of a sentence, its numbers as format fields, and a function that computes them
    Table       a table between markers, and a function that writes its rows
    Given       a figure that is no result: a quote with its source, a setting, arithmetic

`measured/` has what these functions read from results files, and `compare` compares. A number with
a unit, or with a decimal point, that is not declared is an error. So is a declaration that is not
on its page. So is a paragraph that names another kind of GPU than the results file to which it
links (`gpus`). `tests/test_figures.py` checks all of it.
"""
