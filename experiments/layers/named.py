"""What named activations cost: Llama layers in plain JAX, by what their checkpoints save.

Claim: FP8 residuals under JAX's own `jax.checkpoint` take half of BF16's memory, and no time. A
step of a scan over eight of Llama-2-7B's layers is timed, with the gradients of weights and input.

    python -m experiments.layers.named      on a GPU
    python -m experiments.layers.named --width 64 --sequence 64 --batch 1 --depth 2     anywhere

    no checkpoint             JAX saves what it needs
    BF16                      `save_only_these_names`: gate, up and the inputs of both norms
    FP8                       the same names, by `coat.policies.save_fp8`
    BF16 / FP8, offloaded     the same, in pinned host memory
    recomputed                layers save their inputs alone
    COAT_BF16_FORWARD, COAT   coat_jax's own layers, in the same scan

Attention saves its queries, keys, values and outputs in BF16; its softmax is cuDNN's on a GPU.
"Memory" is what the compiled step needs besides arguments and results, by XLA's account.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import coat_jax as coat
from coat_jax.training.compilation import NO_TRITON_GEMM
from experiments import records
from experiments.command import parser_of
from experiments.layers import Sizes, in_jax
from experiments.small_llama import rope
from experiments.timing import medians_ms

NAMES = ("attention_input", "mlp_input", "gate", "up")
POLICIES = jax.checkpoint_policies
Layer = Callable[[in_jax.Weights, jax.Array], jax.Array]


def main() -> None:
    """Compiles all ways, times them in turns and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, default=4096, help="width of the residual stream")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--depth", type=int, default=8, help="layers of the scan")
    options = parser.parse_args()
    width = options.width
    sizes = Sizes(width, options.sequence, options.batch, head=min(128, width))
    layers, x = in_jax.create(sizes, options.depth, jax.random.key(0))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    del layers
    results: list[Any] = [None]

    def runs_of(program: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        def run() -> None:
            results[0] = None
            results[0] = program(stacked, x)

        return run, lambda: jax.block_until_ready(results[0])

    cases, runs = [], []
    for name, layer in ways(sizes).items():
        program = jax.jit(functools.partial(step, layer)).lower(stacked, x).compile(NO_TRITON_GEMM)
        memory = program.memory_analysis()
        cases.append(
            {
                "way": name,
                "memory": memory.temp_size_in_bytes,
                "host_memory": memory.host_temp_size_in_bytes,
            }
        )
        runs.append(runs_of(program))
        print(f"{name:24} {memory.temp_size_in_bytes / 1e9:6.2f} GB", flush=True)
    for case, ms in zip(cases, medians_ms(runs, warmup=1, batches=5, calls=2), strict=True):
        case["ms"] = ms
        print(f"{case['way']:24} {ms:7.1f} ms", flush=True)
    records.write(
        options.out / "named_layers.json",
        {**sizes._asdict(), "depth": options.depth, "unit": sizes.unit, "cases": cases},
    )


def ways(sizes: Sizes) -> dict[str, Layer]:
    """Layers, by what they save."""
    offloaded = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(NAMES),
        offload_src="device",
        offload_dst="pinned_host",
    )
    unrounded, fp8 = checkpoint_name, coat.save_fp8
    in_fp8, fp8_offloaded = (
        coat.policies.save_fp8(*NAMES, offload=offload) for offload in (False, True)
    )
    plain = functools.partial(plain_layer, sizes)
    whole = functools.partial(plain, unrounded, lambda part: part)
    return {
        "no checkpoint": whole,
        "BF16": functools.partial(plain, unrounded, saving(POLICIES.save_only_these_names(*NAMES))),
        "FP8": functools.partial(plain, fp8, saving(in_fp8)),
        "BF16, offloaded": functools.partial(plain, unrounded, saving(offloaded)),
        "FP8, offloaded": functools.partial(plain, fp8, saving(fp8_offloaded)),
        "recomputed": saving(None)(whole),
        "COAT_BF16_FORWARD": functools.partial(in_jax.layer, sizes, coat.COAT_BF16_FORWARD),
        "COAT": functools.partial(in_jax.layer, sizes, coat.COAT),
    }


def saving(policy: Any) -> Callable[[Layer], Layer]:
    """What a checkpoint with this policy makes of a part of a layer."""
    return functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)


def plain_layer(
    sizes: Sizes,
    name: Callable[[jax.Array, str], jax.Array],
    checkpoint: Callable[[Any], Any],
    w: in_jax.Weights,
    x: jax.Array,
) -> jax.Array:
    """A Llama layer as anybody would write it, its two halves in checkpoints, attention outside."""

    @checkpoint
    def heads(w: in_jax.Weights, x: jax.Array) -> tuple[jax.Array, ...]:
        n = norm(name(x, "attention_input"), w["norm"])
        q, k, v = ((n @ w[part]).reshape(*x.shape[:2], -1, sizes.head) for part in "qkv")
        return rope(q), rope(k), v

    @checkpoint
    def mlp(w: in_jax.Weights, x: jax.Array) -> jax.Array:
        x = name(x, "mlp_input")
        n = norm(x, w["mlp_norm"])
        gate, up = (name(n @ w[part], part) for part in ("gate", "up"))
        return x + (jax.nn.silu(gate) * up) @ w["down"]

    cudnn = "cudnn" if jax.default_backend() == "gpu" else None
    o = jax.nn.dot_product_attention(*heads(w, x), is_causal=True, implementation=cudnn)
    return mlp(w, x + o.reshape(x.shape) @ w["o"])


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm, in FP32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def step(layer: Layer, layers: in_jax.Weights, x: jax.Array) -> Any:
    """The gradients of weights and input, for an output gradient of ones.

    There is no loss, because its reduction would be measured, too.
    """

    def stack(layers: in_jax.Weights, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x, layers)[0]

    y, pull = jax.vjp(stack, layers, x)
    return pull(jnp.roll(y, 1, axis=1))


if __name__ == "__main__":
    main()
