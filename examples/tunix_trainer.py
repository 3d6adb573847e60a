"""Tunix: `PeftTrainer` on its own Llama 3, all parameters or LoRA adapters.

    python -m examples.tunix_trainer

The trainer takes any optax transformation, so that 8-bit moments alone are one line. After
`coat.nn.convert` the MLPs multiply in FP8; Tunix's norms and einsums are classes of its own, which
`convert` leaves alone (`plan_conversion` lists them). A provider as in `examples.qwix_provider`
reaches the einsums, too.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft import utils
from tunix.sft.hooks import TrainingHooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

import coat_jax as coat
from examples import check


class Losses(TrainingHooks):
    """Remembers the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_step_end(self, trainer: PeftTrainer, step: int, loss: float) -> None:
        """Called by the trainer."""
        self.values.append(float(loss))

    def on_train_start(self, *args: Any) -> None:
        """The hooks that are not needed here."""

    on_train_end = on_train_step_start = on_eval_step_start = on_eval_step_end = on_train_start


def model_inputs(example: TrainingInput) -> dict[str, Any]:
    """What Tunix's default loss passes to the model."""
    return {
        "input_tokens": example.input_tokens,
        "input_mask": example.input_mask,
        "positions": utils.build_positions_from_mask(example.input_mask),
        "attention_mask": utils.make_causal_attn_mask(example.input_mask),
    }


def training_inputs(data: Iterable[np.ndarray]) -> Iterator[TrainingInput]:
    """Tokens as Tunix takes them: nothing is padding."""
    for tokens in data:
        yield TrainingInput(input_tokens=tokens, input_mask=np.ones(tokens.shape, bool))


def llama(width: int, layers: int) -> Llama3:
    """Tunix's model, sharded as it asks for, with weights of its own initialization.

    Only those of the MLPs are drawn here: Tunix makes them zero, and their gradients with them.
    """
    config = ModelConfig(
        num_layers=layers,
        vocab_size=check.VOCAB,
        embed_dim=width,
        hidden_dim=4 * width,
        num_heads=4,
        head_dim=width // 4,
        num_kv_heads=4,
        rope_theta=10000,
        norm_eps=1e-5,
    )
    rngs = nnx.Rngs(0)
    model = Llama3(config, rngs=rngs)
    for layer in model.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            draw = nnx.initializers.normal(0.02)
            linear.kernel[...] = draw(rngs.params(), linear.kernel.shape)
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model


def with_adapters(model: Llama3, rank: int) -> Llama3:
    """LoRA adapters as Tunix's users add them: through Qwix."""
    provider = qwix.LoraProvider(module_path=".*attn/._proj", rank=rank, alpha=2.0 * rank)
    return qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(1))


def train(
    fp8: bool,
    data: Iterable[np.ndarray] | None = None,
    *,
    convert: bool = True,
    lora: bool = False,
    width: int = 128,
    layers: int = 1,
) -> check.Run:
    """Trains on all devices; `fp8` adds the lines of coat_jax: both, or the optimizer's alone."""
    rate = 1e-2 if lora else 3e-3
    with check.mesh("fsdp", "tp"):  # not jax.set_mesh: Tunix looks for the mesh where this puts it
        model = llama(width, layers)
        if fp8 and convert:
            model = coat.nn.convert(model, coat.COAT)
        tx = coat.optax.fp8_adamw(rate) if fp8 else optax.adamw(rate)
        if lora:
            model = with_adapters(model, rank=width // 4)
        losses = Losses()
        trainer = PeftTrainer(model, tx, TrainingConfig(eval_every_n_steps=1000))
        trainer = trainer.with_gen_model_input_fn(model_inputs)
        trainer.with_training_hooks(losses)
        inputs = training_inputs(check.batches() if data is None else data)
        first = next(inputs)
        trainer.train(itertools.chain([first], inputs))
        step = nnx.jit(trainer.create_train_step_fn())
        program = step.lower(model, trainer.optimizer, first).as_text()
    params = nnx.state(model, nnx.LoRAParam if lora else nnx.Param)
    return check.Run(losses.values, params, nnx.state(trainer.optimizer), program)


if __name__ == "__main__":
    check.compare(train, fp8_products=True)
    check.compare(functools.partial(train, convert=False), fp8_products=False)
    check.compare(functools.partial(train, lora=True, width=256), fp8_products=True)
