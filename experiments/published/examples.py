"""What coat_jax saves in other trainers: examples_memory and examples_memory_large."""

from experiments.published.results import GB, case

EXAMPLES = {  # by results file and name
    ("examples_memory", "flax_nnx"): "Flax NNX",
    ("examples_memory", "flax_linen"): "Flax Linen",
    ("examples_memory", "flax_lora"): "Flax NNX with LoRA, base weights in FP8",
    ("examples_memory", "qwix_provider"): "Qwix",
    ("examples_memory", "equinox_loop"): "Equinox, MLPs alone",
    ("examples_memory", "tunix_trainer"): "Tunix",
    ("examples_memory", "tunix_trainer, LoRA"): "Tunix with LoRA",
    ("examples_memory_large", "maxtext_train"): "MaxText",
    (
        "examples_memory_large",
        "hugging_face",
    ): "transformers in torch; with coat_jax, parameters in BF16",
}


def table() -> list[list[str]]:
    """Every example without coat_jax and with it."""
    columns = ("peak, GB", "optimizer state, GB", "ms a step")
    rows = [["", *(cell for column in columns for cell in (column, "with coat_jax"))]]
    for (file, name), words in EXAMPLES.items():
        both = [case(file, example=name, coat_jax=ours) for ours in (False, True)]
        cells = [f"{c[kind] / GB:.2f}" for kind in ("peak_bytes", "state_bytes") for c in both]
        rows.append([words, *cells, *(f"{c['ms']:.1f}" for c in both)])
    return rows


def losses_apart() -> str:
    """By how many percent the loss of an example in the table differs with coat_jax, at most."""
    losses = [
        [case(file, example=name, coat_jax=ours)["loss"] for ours in (False, True)]
        for file, name in EXAMPLES
    ]
    return f"{100 * max(abs(ours / theirs - 1) for theirs, ours in losses):.1f}"
