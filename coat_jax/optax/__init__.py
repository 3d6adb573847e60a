"""Optimizers with 8-bit states, as optax transformations.

    fp8_adamw                       AdamW; scale_by_fp8_adam is its maths alone. Like fp8_muon it
                                    stores integers and logarithms unless FP8 is asked for
    fused_fp8_adamw                 the same in one pass and in place, for your own training loop
    fp8_muon                        Muon for matrices with AdamW for the rest; scale_by_fp8_muon is
                                    its maths alone, hidden_matrices the default choice of matrices
    in_place                        any optax transformation with the same interface, in place
    in_host_memory                  such an optimizer with its state in the memory of the host
    step_by_stages                  a step whose backward pass frees gradients as it goes
    compress, decompress            any optax transformation with its moments stored in FP8
    stochastic_round_updates        makes optax.apply_updates round BF16 parameters stochastically
    apply_updates                   optax.apply_updates with stochastic rounding
    with_corrections                trains BF16 parameters as numbers of 24 bits, 8 of them in the
                                    state; corrected_params returns all 24 bits, in FP32
    global_norm, global_norm_scale  the global norm, summed in FP32, and the factor that clips it
    state_shardings                 the shardings of an optimizer's state, from its parameters'
    fitting_group_size              the largest group size with which devices hold whole groups
    save_state, restore_state       checkpoints; a state in another format is refused

The functions that store moments in 8 bits take a `coat.Storage`, which holds the formats.

The files and folders, each of which imports only those of the lines above its own:

    masks, derivatives              which parameters a mask selects; derivatives through a step
    checks/                         checks of arguments, parameters, gradients and states
    states/                         states of any optimizer: selection, shardings, checkpoints
    clipping, dtypes, rounding      the global norm; casts of trees; stochastic rounding
    corrections                     parameters of 24 bits
    adam_state                      Adam's state and its step
    adam, fused, compression        fp8_adamw; the same in one pass; compress
    in_place, partitioned/, muon/      any transformation as a step in place; steps in parts; Muon
"""

from coat_jax.optax.adam import fp8_adamw, scale_by_fp8_adam
from coat_jax.optax.adam_state import ScaleByFP8AdamState
from coat_jax.optax.clipping import global_norm, global_norm_scale
from coat_jax.optax.compression import CompressedState, compress, decompress
from coat_jax.optax.corrections import CorrectedState, corrected_params, with_corrections
from coat_jax.optax.fused import InPlaceOptimizer, fused_fp8_adamw
from coat_jax.optax.in_place import InPlaceState, in_place
from coat_jax.optax.muon.matrices import hidden_matrices
from coat_jax.optax.muon.transformation import ScaleByFP8MuonState, fp8_muon, scale_by_fp8_muon
from coat_jax.optax.partitioned.offload import in_host_memory
from coat_jax.optax.partitioned.release import Stage, Stepped, step_by_stages
from coat_jax.optax.rounding import (
    StochasticRoundState,
    apply_updates,
    stochastic_round_updates,
)
from coat_jax.optax.states.checkpoint import restore_state, save_state
from coat_jax.optax.states.sharding import fitting_group_size, state_shardings
from coat_jax.storage import Storage

__all__ = [
    "CompressedState",
    "CorrectedState",
    "InPlaceOptimizer",
    "InPlaceState",
    "ScaleByFP8AdamState",
    "ScaleByFP8MuonState",
    "Stage",
    "Stepped",
    "StochasticRoundState",
    "Storage",
    "apply_updates",
    "compress",
    "corrected_params",
    "decompress",
    "fitting_group_size",
    "fp8_adamw",
    "fp8_muon",
    "fused_fp8_adamw",
    "global_norm",
    "global_norm_scale",
    "hidden_matrices",
    "in_host_memory",
    "in_place",
    "restore_state",
    "save_state",
    "scale_by_fp8_adam",
    "scale_by_fp8_muon",
    "state_shardings",
    "step_by_stages",
    "stochastic_round_updates",
    "with_corrections",
]
