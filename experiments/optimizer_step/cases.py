"""What is compared: by kind the cases, each the strings that name it, and the parameters."""

from argparse import Namespace
from typing import Any

F32, BF16 = "float32", "bfloat16"
JAX, TORCH = ("optax", "coat"), ("torch", "bitsandbytes")  # what names of optimizers begin with
ADAMW = {  # the dtypes of parameters and gradients
    "optax.adamw": [(F32, BF16), (F32, F32), (BF16, BF16)],
    "coat in_place(fp8_adamw)": [(F32, BF16), (F32, F32), (BF16, BF16)],
    "coat in_place(fp8_adamw), stochastic": [(BF16, BF16)],
    "coat in_place(fp8_adamw), 24 bits, stochastic": [(BF16, BF16)],
    "coat fp8_adamw chain": [(F32, BF16), (BF16, BF16)],
    "coat fp8_adamw chain, XLA": [(F32, BF16)],
    "torch AdamW fused": [(F32, F32), (BF16, BF16)],
    "torchao AdamWFp8": [(F32, F32), (BF16, BF16)],
    "torchao AdamW8bit": [(F32, F32), (BF16, BF16)],
    "bitsandbytes AdamW8bit": [(F32, F32), (BF16, BF16)],
}
PRODUCTS = "products"
MUON = (
    PRODUCTS,
    "coat fp8_muon",
    "torch Muon",
    "optax muon, BF16 momentum",
    "optax muon, FP32 momentum",
)
ITERATIONS = 5  # of Newton-Schulz, everywhere

Case = dict[str, str]
Shapes = list[tuple[int, ...]]


def adamw(options: Namespace) -> list[Case]:
    """On one array; and on those of Llama-2-7B, if the array is as large as in the results."""
    return [
        {"model": model, "optimizer": name, "params": params, "grads": grads}
        for model in (("one_leaf", "llama2_7b") if options.elements >= 28 else ("one_leaf",))
        for name, dtypes in ADAMW.items()
        for params, grads in dtypes
        if model == "one_leaf" or name.startswith(TORCH) or ("XLA" not in name and grads == BF16)
    ]


def muon(options: Namespace) -> list[Case]:
    """The products first, with which the others are compared."""
    del options
    return [{"case": name} for name in MUON]


KINDS = {"adamw": adamw, "muon": muon}


def parameters(model: str, log2_elements: int) -> Shapes:
    """Of `llama2_7b`, every layer's by itself; of `one_leaf` a single matrix."""
    if model == "one_leaf":
        rows = 2 ** (log2_elements // 2)
        return [(rows, 2**log2_elements // rows)]
    hidden, ffn, vocabulary = 4096, 11008, 32000
    layer = [(hidden, hidden)] * 4 + [(hidden, ffn)] * 2 + [(ffn, hidden)] + [(hidden,)] * 2
    return [(vocabulary, hidden), *layer * 32, (hidden,), (hidden, vocabulary)]


def matrices(model: str, layers: int) -> list[tuple[int, int]]:
    """The hidden matrices of the first layers of a model in `coat.models.PRESETS`."""
    from coat_jax import models

    config = models.config_of(model)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = [(config.width, queries), *[(config.width, keys)] * 2, (queries, config.width)]
    mlp = [*[(config.width, config.ffn)] * 2, (config.ffn, config.width)]
    return [*attention, *mlp] * layers


def about(kind: str, options: Namespace) -> dict[str, Any]:
    """What the results file of a kind says of all cases."""
    if kind == "muon":
        return {"model": options.model, "layers": options.layers}
    return {"elements": 2**options.elements}


def calls(shapes: Shapes) -> int:
    """Steps between two drains of the device: enough to hide what the drain costs."""
    return 50 if len(shapes) == 1 else 5
