"""What all studies share: they train arms over seeds, and compare them seed by seed.

An arm is a way to train, and differs from a baseline by one thing. A run trains one arm from one
seed, or several side by side, and has one row or more in a results file, which grows and merges.

    study                   what is particular to a study: arms, sizes, and how a run is measured
    command                 its command line: lists, plans, measures, merges and shows
    queue, worker           runs in processes, within a time limit; one run in its process
    rows, description       what names a row, so that it is measured once
    statistics, tables      differences paired by seed, with intervals

The studies are `loss_study`, `fine_tuning`, `after_training`, `int4_study` and `stability`.
"""
