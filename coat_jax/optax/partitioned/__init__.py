"""Steps that update the parameters in parts, so that less is on the device at once.

parts     parameters and state, split into parts that are stepped and copied one after another
offload   an optimizer whose state is in the memory of the host
release   a step whose backward pass updates each stage of a model and frees its gradients
"""
