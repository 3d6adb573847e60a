"""Llama of 124 million parameters: the size of the smallest GPT-2, with its vocabulary.

    coat train llama_124m --train 'tokens/*.npy'          COAT
    coat train llama_124m:bf16 --train 'tokens/*.npy'     BF16, optax's AdamW

Batch (0.5 million tokens), learning rate, AdamW, clipping and the cosine down to a tenth are those
of GPT-3 with 125 million parameters (Brown et al. 2020, table 2.1 and appendix B), as is the warmup
over 375 million tokens; the length is ten billion tokens. The vocabulary is GPT-2's 50,257, padded
to a multiple of 128. Parameters are FP32, as in that paper.

Made for one GPU; docs/benchmarks.md lists the memory that it takes, docs/loss.md what COAT costs in
loss.
"""

from coat_jax import models
from coat_jax.training.config import EvaluationConfig, OptimizerConfig, TrainConfig
from coat_jax.training.data import DataConfig

TOKENS, WARMUP_TOKENS = 10_000_000_000, 375_000_000
BATCH, SEQUENCE = 512, 1024


def config() -> TrainConfig:
    """In COAT."""
    model = models.Config(
        vocab=50304,
        width=768,
        layers=12,
        heads=12,
        kv_heads=12,
        head_dim=64,
        ffn=2048,
        context=SEQUENCE,
        tied=True,
        scan=False,
    )
    return TrainConfig(
        model=model,
        data=DataConfig(train=("tokens/*.npy",)),
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=WARMUP_TOKENS / TOKENS),
        evaluation=EvaluationConfig(every=250),
        total_steps=TOKENS // (BATCH * SEQUENCE),
        global_batch_size=BATCH,
        sequence_length=SEQUENCE,
        gradient_accumulation_steps=8,
        out="out/llama_124m",
    )
