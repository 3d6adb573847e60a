"""The trainer: from a config to a checkpoint, on one machine or many.

Read it in this order:

config, overrides         what a run is; config files and the command line
mesh, batches             devices, and how a batch lies on them
schedule, optimizer       the learning rate, and AdamW in FP8 or FP32
state, step               what is trained, and one step of it
loop, recorder            the run, and what is said of it
accounting, speed         memory, and the share of the device's peak
evaluation, identity      held-out loss; whether a run may go on with another config
run_folder, run_lock      whose a folder is; position: where the run in it stands
checkpoint and below      saving and restoring
data/                     where tokens come from
metrics, writers, progress, plot   where numbers go
distributed, agreement    several processes as one
"""
