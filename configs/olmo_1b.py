"""OLMo with 1.2 billion parameters: what the COAT paper pretrains.

    coat train olmo_1b --train 'tokens/*.npy'             COAT
    coat train olmo_1b:bf16 --train 'tokens/*.npy'        BF16, optax's AdamW

Hyper-parameters of OLMo-1B.yaml in the OLMo project (Groeneveld et al. 2024): batches of 4 million
tokens, a learning rate of 4e-4, 2000 steps of warmup, a cosine down to a tenth, over 3.1 trillion
tokens.

Token files in OLMo's layout are read as they are: give their paths with --train, and --end_of_text
50279. Parameters are FP32, as in OLMo.

Made for one GPU; docs/benchmarks.md lists the memory that it takes.
"""

from coat_jax import models
from coat_jax.training.config import EvaluationConfig, OptimizerConfig, TrainConfig
from coat_jax.training.data import DataConfig


def config() -> TrainConfig:
    """In COAT."""
    return TrainConfig(
        model=models.config_of("olmo_1b"),
        data=DataConfig(train=("tokens/*.npy",)),
        optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=2000),
        evaluation=EvaluationConfig(every=1000),
        total_steps=739_328,
        global_batch_size=2048,
        sequence_length=2048,
        gradient_accumulation_steps=128,
        out="out/olmo_1b",
    )
