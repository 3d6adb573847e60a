"""What a run reports, while it runs and afterwards.

accounting          its memory on each device, before the first step
recorder            from the results of steps to records
metrics, writers    records in metrics.jsonl, TensorBoard, Weights & Biases
progress            the lines on a terminal
speed               arithmetic per token, and the share of the device's peak FLOP/s
telemetry           what FP8 does to tensors, by a second program every n-th step
best_formats        which small format suits each tensor of a model: `coat formats`
runs                records read back from metrics.jsonl
plot, page, heat    pictures of runs; chart, titles: their style and words; output: their files
"""
