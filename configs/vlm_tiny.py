"""A model of a million parameters that sees: it reads drawn numbers, and answers questions.

This shows that everything works on a laptop in minutes. A drawing has two to four digits in its
corners; the model learns to read them, to say what is in a corner, and to count them.

    coat train vlm_tiny            COAT: FP8 layers in tower and decoder, moments in 8 bits
    coat train vlm_tiny:bf16       BF16 layers, optax's AdamW with FP32 moments
    python -m experiments.vision_demo     both, compared on 2,000 drawings that neither has seen

Pictures of 56 x 56 pixels are 16 patches, each a token of the decoder, which reads bytes. No
release of a model has this size; the learning rate was found by trying a few.
"""

from coat_jax.models import vision_language
from coat_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    TrainConfig,
)
from coat_jax.training.data import PicturesConfig


def config() -> TrainConfig:
    """In COAT."""
    return TrainConfig(
        model=vision_language.config_of("vlm_tiny"),
        data=PicturesConfig(template="{role}: {content}{end}"),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0.1),
        evaluation=EvaluationConfig(every=200),
        checkpoint=CheckpointConfig(every=200),
        total_steps=800,
        global_batch_size=16,
        sequence_length=112,
        out="out/vlm_tiny",
    )
