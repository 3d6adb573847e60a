"""Moments of optimizers in 8 bits: how far updates are from exact.

once          moments of AdamW, encoded and decoded once, by format
muon          the momentum of Muon, in every way to store it, over a training
recording     moments of a small Llama at some steps of its training
followed      optimizers that follow one training on its gradients
coders        ways to store a moment
stored        Adam with moments that such a coder, or part of a format, stores at each step

`experiments.accumulated_error` measures AdamW's moments over a training.
"""
