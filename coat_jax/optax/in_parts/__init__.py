"""Steps that update the parameters in parts, so that less is on the device at once.

parts     a split of the parameters and their state, and the order of its parts
offload   the state is in the memory of the host
release   the backward pass frees the gradients of each stage
"""
