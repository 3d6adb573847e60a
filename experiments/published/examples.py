"""What coat_jax saves in other trainers: examples_memory and examples_memory_large."""

from typing import Any

from experiments.published.results import GB, case

EXAMPLES = {
    "flax_nnx": "Flax NNX",
    "flax_linen": "Flax Linen",
    "flax_lora": "Flax NNX with LoRA, base weights in FP8",
    "qwix_provider": "Qwix",
    "equinox_loop": "Equinox, MLPs alone",
    "tunix_trainer": "Tunix",
    "tunix_trainer, LoRA": "Tunix with LoRA",
    "maxtext_train": "MaxText",
    "hugging_face": "transformers in torch; with coat_jax, parameters in BF16",
}
LARGE = ("maxtext_train", "hugging_face")


def table() -> list[list[str]]:
    """Every example without coat_jax and with it."""
    columns = ("peak, GB", "optimizer state, GB", "ms a step")
    rows = [["", *(cell for column in columns for cell in (column, "with coat_jax"))]]
    for name, words in EXAMPLES.items():
        both = _both(name)
        cells = [f"{c[kind] / GB:.2f}" for kind in ("peak_bytes", "state_bytes") for c in both]
        rows.append([words, *cells, *(f"{c['ms']:.1f}" for c in both)])
    return rows


def losses_apart() -> str:
    """By how many percent the loss of an example in the table differs with coat_jax, at most."""
    apart = []
    for name in EXAMPLES:
        theirs, ours = (one["loss"] for one in _both(name))
        apart.append(abs(ours / theirs - 1))
    return f"{100 * max(apart):.1f}"


def _both(name: str) -> list[dict[str, Any]]:
    file = "examples_memory_large" if name in LARGE else "examples_memory"
    return [case(file, example=name, coat_jax=ours) for ours in (False, True)]
