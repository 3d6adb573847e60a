"""How stable training is as formats get smaller: grids of learning rate, seed and format.

    study                the study, as `experiments.study` takes it
    arms, arm            the formats, and the sizes of model that they are tried at
    training, unscaled   all seeds and learning rates of a format as one program
    sharpness            how much a token's loss can grow if its logits change a little
    events               what counts as diverged and stuck: fixed before the runs
    failures             exact statistics of pairs
    conditions, show     runs that can be compared; tables and pictures of them

Commit 12e08a75 also measured spikes, areas under ROC curves, sensitivity to the learning rate, and
formats of the head; arms that it measured and that are gone are still in the results.
"""
