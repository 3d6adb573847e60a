"""What INT8 and FP8 cost a trained network, and whether training in FP8 lowers this cost.

See `__main__.py`; `run` makes one run, `changes` evaluates many.
"""
