"""Checks of what optimizers are given, before anything is computed."""
