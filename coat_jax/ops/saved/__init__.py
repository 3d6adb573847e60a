"""What each op saves for its backward pass, and how it is recomputed from that.

array         one array: in FP8 blocks, or as it is
norm          the norm before a linear layer
activation    the activation between two linear layers
attention     attention between its projections
projection    the linear layers themselves, which all ops share
"""
