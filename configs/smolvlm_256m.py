"""SmolVLM of 256 million parameters, tuned on conversations with pictures.

    coat train smolvlm_256m --init_from FOLDER --train talks.jsonl --tokenizer FOLDER/tokenizer.json

The sizes and the tokens are those of HuggingFaceTB/SmolVLM-256M-Instruct, which is to be downloaded
into the folder. The published template has <|im_start|> once in a conversation; here it begins each
message. Pictures are
not split into tiles, so each is 64 tokens. A row has room for four pictures; the tower computes
four in every row, so a lower --pictures_per_row is faster where conversations have fewer. The
learning rate is a usual one for tuning all parameters.
"""

from coat_jax.models import vision_language
from coat_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    TrainConfig,
)
from coat_jax.training.data import PicturesConfig

FAKE = "<fake_token_around_image>"


def config() -> TrainConfig:
    """In COAT."""
    return TrainConfig(
        model=vision_language.config_of("smolvlm_256m"),
        data=PicturesConfig(
            train=("talks.jsonl",),
            pictures_per_row=4,
            picture_before=f"{FAKE}<global-img>",
            picture_after=FAKE,
            template="<|im_start|>{Role}: {content}{end}\n",
            end_of_text=49279,  # <end_of_utterance>
        ),
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=0.03),
        evaluation=EvaluationConfig(every=200),
        checkpoint=CheckpointConfig(every=200),
        total_steps=1000,
        global_batch_size=32,
        sequence_length=1024,
        out="out/smolvlm_256m",
    )
