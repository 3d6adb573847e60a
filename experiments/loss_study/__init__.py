"""What each part of FP8 training costs in loss, and how much of that is noise.

    study                    the study, as `experiments.study` takes it
    arms, arm                what is compared: a table of arms and sizes, and what these are
    text, duplicates, rows   the text that is trained on
    training                 one run
    conditions, show         which runs can be compared; tables and pictures of them
    muon                     Muon, for arms
    operands, saved          single operands of products, and what layers save, in few bits

`python -m experiments.loss_study` is the program; docs/loss_study.md says how to use it. Arms that
were measured once and that no page quotes are in the results, and in commit 12e08a75.
"""
