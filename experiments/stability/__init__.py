"""How stable training is as formats get smaller: grids of learning rate, seed and format.

arms          the formats, and the sizes of model that they are tried at: tables
train         all seeds and learning rates of a format as one program
events        what counts as diverged, spiked and recovered: fixed before the runs
statistics    rates with intervals, exact tests, sensitivity to the learning rate
prediction    whether sharpness, gradient norm or loss predict divergence
results       rows in a file that grows
measure       which rows are missing, and measuring them
table, picture    what was found
"""
