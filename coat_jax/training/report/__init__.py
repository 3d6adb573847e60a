"""Reports of a run, while it trains and afterwards.

accounting          memory on each device, before the first step
recorder            from the results of steps to records
metrics             records in metrics.jsonl, TensorBoard, Weights & Biases
progress            records on a terminal
telemetry           statistics of tensors in FP8, by a second program every n-th step
best_formats        bits that are right of each tensor in small formats: `coat formats`
plot, chart         pictures of runs: `coat plot`
"""
