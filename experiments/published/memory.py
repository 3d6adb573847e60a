"""What COAT_LEAN, which saves more in FP8 than COAT does, costs."""

from experiments.published.loss import effects, layer_ms


def lean_time() -> str:
    """By how many percent a layer takes longer than in COAT."""
    return f"{100 * (layer_ms('COAT_LEAN') / layer_ms('COAT') - 1):.0f}"


def lean_loss() -> str:
    """How much higher the loss of 124 million parameters ends than in COAT, in percent."""
    found = effects("124m_longer", above="muon_coat").effects["muon_coat_lean"]
    return f"{100 * found.mean:.2f}"
