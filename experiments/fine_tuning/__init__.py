"""What FP8 costs a network that is tuned on other text than it was trained on.

See `__main__.py`; `ways` has the ways of tuning, `prose` chooses the text, `run` makes one run.
"""
