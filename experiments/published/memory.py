"""What saving activations in FP8 costs: in COAT_LEAN, and in a model of plain JAX."""

from experiments.published.loss import effects, layer_ms
from experiments.published.results import GB, of

WAYS = {  # names in named_layers.json, and on the page
    "BF16": "`save_only_these_names`",
    "FP8": "**`save_fp8`**",
    "BF16, offloaded": "JAX's offloading",
    "FP8, offloaded": "**`save_fp8`, `offload=True`**",
    "recomputed": "nothing but the layer's input",
    "COAT_BF16_FORWARD": "coat_jax's layers, `COAT_BF16_FORWARD`",
    "COAT": "coat_jax's layers, `COAT`",
}


def lean_time() -> str:
    """By how many percent a layer takes longer than in COAT."""
    return f"{100 * (layer_ms('COAT_LEAN') / layer_ms('COAT') - 1):.0f}"


def lean_loss() -> str:
    """How much higher the loss of 40 million parameters ends for it, in percent."""
    above = effects("muon", above="muon_coat_bf16_forward").effects
    found = above["muon_coat_lean_bf16_forward"]
    return f"{100 * found.mean:.2f}"


def named() -> list[list[str]]:
    """What a step of eight layers in a scan takes, by what is saved."""
    cases = {case["way"]: case for case in of("named_layers")["cases"]}
    rows = [["a step saves by", "GB", "on the host", "ms"]]
    for way, name in WAYS.items():
        case = cases[way]
        host = f"{case['host_memory'] / GB:.1f}" if case["host_memory"] else ""
        rows.append([name, f"{case['memory'] / GB:.1f}", host, f"{case['ms']:.0f}"])
    return rows
