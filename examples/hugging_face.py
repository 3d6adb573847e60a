"""Hugging Face: load a checkpoint, tune it in FP8, and load the result in transformers.

    python -m examples.hugging_face

transformers trains the same checkpoint beside it, with FP32 parameters and torch's AdamW. coat_jax
takes 4.1 bytes a parameter instead of 12: BF16 parameters, rounded stochastically, and two moments
in 8 bits. Any folder of a supported family works in the place of the tiny one that is made here.
"""

import dataclasses
import tempfile
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

import coat_jax as coat
from coat_jax import models
from examples import check

RATE = 1e-3


def make_checkpoint(folder: Path, width: int, layers: int) -> None:
    """Stands for a download: a Llama in BF16, here with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=check.VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=2048,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def their_loss(model: transformers.PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    """The mean cross-entropy of each token after the first."""
    ids = torch.from_numpy(tokens).long().to(model.device)
    return model(input_ids=ids, labels=ids).loss


def train_theirs(folder: Path, data: Iterable[np.ndarray]) -> check.Run:
    """transformers and torch, in FP32, on a GPU if torch finds one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for tokens in data:
        loss = their_loss(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    moments = [
        state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    return check.Run(losses, None, [jnp.asarray(moment.cpu().numpy()) for moment in moments])


def train_ours(folder: Path, tuned: Path, data: Iterable[np.ndarray]) -> check.Run:
    """coat_jax, on all devices; writes the tuned model to another folder."""
    mesh = check.mesh("fsdp")
    config = dataclasses.replace(
        models.hf.read_config(folder),
        param_dtype="bfloat16",
        precision="coat",
        axes=coat.nn.MeshAxes(fsdp="fsdp"),
    )
    with jax.set_mesh(mesh):
        model = models.hf.load(folder, config)
        graph, params = nnx.split(model, nnx.Param)
        adamw = coat.optax.fp8_adamw(RATE, weight_decay=0.0)
        optimizer = coat.optax.in_place(adamw, round_params="stochastic")
        state = jax.jit(
            optimizer.init, out_shardings=coat.optax.state_shardings(optimizer, params)
        )(params)

        def step(params: nnx.State, state: coat.optax.ScaleByFP8AdamState, tokens: jax.Array):
            def loss_of(params: nnx.State) -> jax.Array:
                batch = models.Batch(tokens[:, :-1], tokens[:, 1:])
                return nnx.merge(graph, params).loss(batch).mean

            loss, grads = jax.value_and_grad(loss_of)(params)
            return *optimizer.step(params, grads, state), loss

        step = jax.jit(step, donate_argnums=(0, 1))
        losses = []
        for tokens in check.sharded(data, mesh):
            params, state, loss = step(params, state, tokens)
            losses.append(float(loss))
        program = step.lower(params, state, tokens).as_text()
        models.hf.save(tuned, nnx.merge(graph, params))
    return check.Run(losses, params, state, program)


def main() -> None:
    """Tunes with both, and loads what coat_jax wrote with transformers."""
    with tempfile.TemporaryDirectory() as name:
        folder, tuned = Path(name) / "downloaded", Path(name) / "tuned"
        make_checkpoint(folder, width=128, layers=1)
        data = list(check.batches())
        ours = train_ours(folder, tuned, data)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(ours.params)} == {"bfloat16"}
        check.compare(lambda fp8: ours if fp8 else train_theirs(folder, data), fp8_products=True)

        before, after = (
            their_loss(transformers.AutoModelForCausalLM.from_pretrained(path), data[-1]).item()
            for path in (folder, tuned)
        )
        print(f"transformers' loss before and after: {before:.4f}, {after:.4f}")
        assert after < 0.9 * before


if __name__ == "__main__":
    main()
