"""Checks of what optimizers are given, before anything is computed.

arguments   the arguments of the functions that make optimizers
trees       parameters, gradients and states
"""
