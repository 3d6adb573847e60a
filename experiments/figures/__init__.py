"""Figures in README, docs and the docstrings of configs, each checked against what it comes from.

    python -m experiments.figures            reports figures that differ from their results files
    python -m experiments.figures --write    corrects them in the pages

Three lists declare every figure:

    sentences   a sentence of a page, its numbers as format fields, each with where it comes from
    tables      a table between markers in a page, written from results files
    given       figures that are not results: quotes with their source, settings, arithmetic

A number with a unit, or with a decimal point, that none of the three declares is an error. So is a
declaration that no page contains. `tests/test_figures.py` checks all of it.
"""
