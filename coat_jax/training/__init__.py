"""The trainer: from a config to a checkpoint, on one machine or many.

Read it in this order:

families                  the kinds of models that it trains
config                    what a run is
config_files, overrides   configs from files; their fields, and changes from the command line
data/                     where tokens come from
optimizer                 AdamW in 8 bits or FP32, or any optax transformation; the learning rate
step                      the state of a run, and one step of training
setup                     what steps are compiled from, the first state, and the compiled steps
loop                      the run: config -> mesh -> data -> state -> steps
cluster/                  many devices and processes as one
checkpoint/               states and weights on disk
report/                   what a run reports: metrics, progress, memory, telemetry, plots
held_out, resume_rules    held-out loss; whether a run may continue with another config
run_folder                which run a folder belongs to, and which process holds it
compilation               XLA's options, and programs that an earlier start has compiled

`import coat_jax.training` imports none of them: from coat_jax.training.loop import train.
"""
