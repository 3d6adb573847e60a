"""What INT8 and FP8 cost a trained network, and whether training in FP8 lowers this cost.

`recipes` has the ways to quantize, `quantizing` makes one run, `changes` finds the costs, and
`study` shows them.
"""
