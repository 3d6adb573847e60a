"""What each part of FP8 training costs in loss, and how much of that is noise.

    arms, arm                what is compared: a table of arms and sizes, and what these are
    text, duplicates         the text that is trained on
    measure, queue, run      which runs are missing; runs side by side; a single run
    results, statistics      one row for each run, and what follows from the rows
    table, plot              tables and pictures of these
    moments, muon            AdamW with each moment in a format of its own, and Muon

`python -m experiments.loss_study` is the program; docs/loss.md says how to use it.
"""
