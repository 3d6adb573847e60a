"""States of any optimizer: which leaf is what, where it is, and how it is saved.

following     which parameter a leaf belongs to
selection     which leaves `compress` stores in FP8
host_memory   leaves in the memory of the host, and copies of them
sharding      shardings of leaves, which are those of their parameters
metadata      Flax's sharding annotations on leaves
checkpoint    saves and restores states; refuses one that does not fit
"""
