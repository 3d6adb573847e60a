"""Flax NNX modules whose products and saved activations are FP8.

    Linear, RMSNorm, LayerNorm           like Flax's, with fewer arguments and a `coat.Precision`
    Embed                                a drop-in for Flax's, with more accurate gradients
    attention_fn                         for Flax's attention modules
    Attention, GatedMLP, MLP             each includes its norm, so that the input is saved once
    ExpertMLP                            a mixture of experts in place of one MLP
    TransformerBlock                     the layer of a decoder
    convert, plan_conversion             replaces the layers of any NNX model, and says which
    saved_bytes                          counts what a module saves for its backward pass
    LoRALinear, freeze                   adapters on weights that are frozen in FP8
    QuantizedLinear                      for inference, its weight in INT8 or FP8

A module's `precision` says what is FP8; see `coat.Precision`. `convert` goes through a model
(`children`) and changes what is `convertible`; the `plan` says what becomes of each module.
"""

from coat_jax.nn.attention import Attention, attention_fn
from coat_jax.nn.block import TransformerBlock
from coat_jax.nn.bytes_saved import saved_bytes
from coat_jax.nn.convert import convert, plan_conversion
from coat_jax.nn.embed import Embed
from coat_jax.nn.experts import ExpertMLP, Routing
from coat_jax.nn.linear import Linear
from coat_jax.nn.lora import FrozenWeight, LoRALinear, freeze
from coat_jax.nn.mlp import MLP, GatedMLP
from coat_jax.nn.norm import LayerNorm, RMSNorm
from coat_jax.nn.parameters import MeshAxes
from coat_jax.nn.plan import Decision, Plan
from coat_jax.nn.quantized import QuantizedLinear
from coat_jax.ops import Past, Visible

__all__ = [
    "MLP",
    "Attention",
    "Decision",
    "Embed",
    "ExpertMLP",
    "FrozenWeight",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "LoRALinear",
    "MeshAxes",
    "Past",
    "Plan",
    "QuantizedLinear",
    "RMSNorm",
    "Routing",
    "TransformerBlock",
    "Visible",
    "attention_fn",
    "convert",
    "freeze",
    "plan_conversion",
    "saved_bytes",
]
