"""MaxText with a remat policy: the arrays that it saves in FP8 instead of their own dtype.

    python -m examples.maxtext_saved

Two functions of JAX that MaxText calls are replaced before it starts: what names its arrays, and
what makes its policy. The config chooses which arrays are saved, as always.
"""

import os
import tempfile
from pathlib import Path

from examples import check

os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # MaxText without the clients of Google Cloud

import jax
from maxtext.layers import attentions, linears

import coat_jax as coat
from examples import maxtext_train

SETTINGS = {
    "remat_policy": "minimal",
    "base_num_decoder_layers": 4,
    "max_target_length": 4 * check.LENGTH,
}


def train(fp8: bool, data: object = None) -> check.Run:
    """Trains on all devices, on MaxText's synthetic data."""
    del data
    named, policy = linears.checkpoint_name, jax.checkpoint_policies.save_only_these_names
    if fp8:
        linears.checkpoint_name = attentions.checkpoint_name = coat.save_fp8
        jax.checkpoint_policies.save_only_these_names = coat.policies.save_fp8
    try:
        with tempfile.TemporaryDirectory() as folder:
            return maxtext_train.run(Path(folder), {**maxtext_train.SETTINGS, **SETTINGS})
    finally:
        linears.checkpoint_name = attentions.checkpoint_name = named
        jax.checkpoint_policies.save_only_these_names = policy


if __name__ == "__main__":
    check.compare_saved(train)
