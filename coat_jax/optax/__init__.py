"""Optimizers with 8-bit states, as optax transformations.

    fp8_adamw                       AdamW; scale_by_fp8_adam is its maths alone. Like fp8_muon it
                                    stores integers and logarithms unless FP8 is asked for
    fp8_muon                        Muon for matrices with AdamW for the rest; scale_by_fp8_muon is
                                    its maths alone, hidden_matrices the default choice of matrices
    in_place                        any optax transformation as a step in place, for your own
                                    training loop; fp8_adamw in one pass over memory
    in_host_memory                  such an optimizer with its state in the memory of the host
    step_by_stages                  a step whose backward pass frees gradients as it goes
    compress, decompress            any optax transformation with its moments stored in FP8
    with_rounding                   makes optax.apply_updates round BF16 parameters as in_place
                                    does: stochastically, or to 24 bits, 8 of them in the state
    corrected_params                all 24 bits of BF16 parameters, in FP32
    global_norm, global_norm_scale  the global norm, summed in FP32, and the factor that clips it
    state_shardings                 the shardings of an optimizer's state, from its parameters'
    fitting_group_size              the largest group size with which devices hold whole groups
    save_state, restore_state       checkpoints; a state in another format is refused

The functions that store moments in 8 bits take a `coat.Storage`, which holds the formats.

The files and folders, each of which imports only those of the lines above its own:

    arguments, trees                checks of arguments; dtypes and shapes of trees
    states/                         states of any optimizer: selection, shardings, checkpoints
    clipping, rounding              the global norm; how parameters are rounded
    adam_state                      Adam's state and its step
    compression, in_place           compress; any transformation as a step in place
    adam, partitioned/              fp8_adamw; steps in parts
    muon/                           fp8_muon
"""

from coat_jax.optax.adam import fp8_adamw, scale_by_fp8_adam
from coat_jax.optax.adam_state import ScaleByFP8AdamState
from coat_jax.optax.clipping import global_norm, global_norm_scale
from coat_jax.optax.compression import CompressedState, compress, decompress
from coat_jax.optax.in_place import InPlaceOptimizer, InPlaceState, in_place, with_rounding
from coat_jax.optax.muon.matrices import hidden_matrices
from coat_jax.optax.muon.transformation import ScaleByFP8MuonState, fp8_muon, scale_by_fp8_muon
from coat_jax.optax.partitioned.offload import in_host_memory
from coat_jax.optax.partitioned.release import Stage, Stepped, step_by_stages
from coat_jax.optax.rounding import CorrectedState, corrected_params
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
    "Storage",
    "compress",
    "corrected_params",
    "decompress",
    "fitting_group_size",
    "fp8_adamw",
    "fp8_muon",
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
    "with_rounding",
]
