"""The numbers and tables of README and docs, written into the pages from results files.

    python -m experiments.published            reports what differs from its results file
    python -m experiments.published --write    writes it into the pages

A page has a number, or a table, and a marker that readers do not see:

    COAT is 1.62<!-- throughput.speed_up 7b --> times as fast.

    <!-- table: throughput.presets -->
    <!-- end of table -->

`throughput` is a module of this package, `speed_up` a function there that returns the text of the
number, `7b` its argument. The function of a table returns its rows, the first being the header.
Numbers without a marker are not checked: they are settings, or come from elsewhere.
"""
