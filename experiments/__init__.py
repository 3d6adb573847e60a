"""Programs that measure: each writes its figures, their origin and a picture.

Each is a module for `python -m`; its docstring says what it claims, on which hardware
it runs, and how to try it anywhere. Results are in `results/`; each file names its commit, which
also has the scripts of studies that are finished.

    optimizers      optimizer_step, accumulated_error, moments, compress_table
    layers          layers, layers.saved
    loss            loss_study, fine_tuning, stability, tradeoff
    formats         format_sqnr, after_training, int4_study
    experts         grouped_speed
    training        training_throughput, communication, memory, examples_memory, gpu_suite
    generation      quantized_generation, int4_speed, past_attention_speed, decode_step
    documentation   ideas (the pictures of docs/ideas.md), demo (`make demo`)
    all of them     published (writes their numbers and tables into README and docs)

The other modules are what these are made of:

    study                 what studies share: runs of arms over seeds, statistics, command line
    command, workers      the command line of others, and processes for each case
    records, row_files    results files, of one run and of many
    timing, rotation      medians of what a device does; operands that come from HBM
    corpus, random_batch  what is learnt; small_llama: what learns
    hopper                compiles for H100s without having them

They import the package; the package never imports them.
"""
