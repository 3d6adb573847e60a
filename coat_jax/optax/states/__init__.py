"""States of any optimizer: which leaf is what, where it is, and how it is saved.

following     which parameter a leaf belongs to
selection     which leaves `compress` stores in FP8
sharding      every leaf is sharded as its parameter is
metadata      sharding annotations
host_memory   leaves in the memory of the host
checkpoint    saved and restored; a state that does not fit is refused
"""
