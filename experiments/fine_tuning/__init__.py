"""What FP8 costs a network that is tuned on other text than it was trained on.

`ways` has the ways of tuning, `prose` chooses the text, `tuning` makes one run, and `study`
compares runs. Commit 12e08a75 also evaluated networks with operands rounded in some of the layers
only; the results still have these losses, which no page quotes.
"""
