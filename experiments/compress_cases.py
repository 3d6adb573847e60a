"""The transformations of `experiments.compress_table`: all of optax and optax.contrib.

TRAINED have a state that follows the parameters, LINKS are what these are made of, STATELESS have
no moments, REFUSED is what `coat.optax.compress` does not take.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import coat_jax as coat

STORAGE = coat.Storage(min_size=1024)


def large(params: Any) -> Any:
    """Which parameters are matrices: for wrappers that choose some."""
    return jax.tree.map(lambda p: jnp.ndim(p) > 1, params)


def small(params: Any) -> Any:
    """The other parameters."""
    return jax.tree.map(lambda p: jnp.ndim(p) < 2, params)


def labels(params: Any) -> Any:
    """`large` as labels, for optax.partition."""
    return jax.tree.map(lambda p: "matrix" if jnp.ndim(p) > 1 else "vector", params)


def muon_dimensions(params: Any) -> Any:
    """All parameters as matrices; optax.masked leaves those that are."""
    return jax.tree.map(lambda p: contrib.MuonDimensionNumbers(), params)


def scaled(rate: float, *links: optax.GradientTransformation) -> optax.GradientTransformation:
    """A chain that ends with a learning rate."""
    return optax.chain(*links, optax.scale_by_learning_rate(rate))


adam = optax.adam(3e-3)
key = jax.random.key(0)

# What stores moments, or copies of parameters: trained.
TRAINED: dict[str, Callable[[], Any]] = {
    "adabelief": lambda: optax.adabelief(3e-3),
    "adadelta": lambda: optax.adadelta(1.0),
    "adafactor": lambda: optax.adafactor(1e-2, momentum=0.9, min_dim_size_to_factor=32),
    "adagrad": lambda: optax.adagrad(3e-2),
    "adam": lambda: adam,
    "adamax": lambda: optax.adamax(3e-3),
    "adamaxw": lambda: optax.adamaxw(3e-3),
    "adamw": lambda: optax.adamw(3e-3),
    "adan": lambda: optax.adan(3e-3),
    "amsgrad": lambda: optax.amsgrad(3e-3),
    "apply_every": lambda: optax.chain(optax.sgd(0.1), optax.apply_every(4)),
    "apply_if_finite": lambda: optax.apply_if_finite(adam, 3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), adam),
    "conditionally_mask": lambda: optax.conditionally_mask(adam, lambda step: step >= 0),
    "conditionally_transform": lambda: optax.conditionally_transform(adam, lambda step: step >= 0),
    "ema": lambda: scaled(0.1, optax.ema(0.9)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(3e-3),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(3e-3),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1.0),
    "lion": lambda: optax.lion(1e-3),
    "lookahead": lambda: optax.lookahead(adam, 5, 0.5),
    "masked": lambda: optax.chain(
        optax.masked(adam, large), optax.masked(optax.scale(-0.1), small)
    ),
    "multi_transform": lambda: optax.multi_transform({"matrix": adam, "vector": adam}, labels),
    "MultiSteps": lambda: optax.MultiSteps(adam, 2),
    "nadam": lambda: optax.nadam(3e-3),
    "nadamw": lambda: optax.nadamw(3e-3),
    "named_chain": lambda: optax.named_chain(("adam", adam)),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "novograd": lambda: optax.novograd(3e-2),
    "optimistic_adam": lambda: optax.optimistic_adam(3e-3),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(3e-3),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.1),
    "partition": lambda: optax.partition({"matrix": adam, "vector": optax.sgd(0.1)}, labels),
    "radam": lambda: optax.radam(3e-3),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9),
    "rprop": lambda: optax.rprop(1e-3),
    "selective_transform": lambda: optax.selective_transform(
        adam, freeze_mask={"up": False, "up_bias": True, "down": False, "down_bias": True}
    ),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "signum": lambda: optax.signum(1e-3),
    "sm3": lambda: optax.sm3(0.1),
    "snapshot": lambda: optax.chain(adam, optax.snapshot("last", lambda updates: updates)),
    "trace": lambda: scaled(0.1, optax.trace(0.9)),
    "with_extra_args_support": lambda: optax.with_extra_args_support(adam),
    "yogi": lambda: optax.yogi(3e-3),
    "contrib.acprop": lambda: contrib.acprop(1e-3),
    "contrib.ademamix": lambda: contrib.ademamix(3e-3),
    "contrib.adopt": lambda: contrib.adopt(3e-3),
    "contrib.cocob": contrib.cocob,
    "contrib.dadapt_adamw": lambda: contrib.dadapt_adamw(1.0),
    "contrib.dog": lambda: contrib.dog(1.0),
    "contrib.dowg": lambda: contrib.dowg(1.0),
    "contrib.dpsgd": lambda: contrib.dpsgd(0.1, 1.0, 0.01, 0, momentum=0.9),
    "contrib.galore": lambda: contrib.galore(3e-3, rank=32),
    "contrib.madgrad": lambda: contrib.madgrad(1e-2),
    "contrib.mechanize": lambda: contrib.mechanize(optax.adamw(3e-3)),
    "contrib.momo": lambda: contrib.momo(1.0),
    "contrib.momo_adam": lambda: contrib.momo_adam(1e-2),
    "contrib.muon": lambda: contrib.muon(1e-2),
    "contrib.prodigy": lambda: contrib.prodigy(1.0),
    "contrib.sam": lambda: contrib.sam(adam, optax.sgd(0.01)),
    "contrib.schedule_free": lambda: contrib.schedule_free(optax.sgd(0.5), 0.5),
    "contrib.schedule_free_adamw": lambda: contrib.schedule_free_adamw(1e-2),
    "contrib.schedule_free_sgd": lambda: contrib.schedule_free_sgd(0.5),
    "contrib.simplified_ademamix": lambda: contrib.simplified_ademamix(1e-4),
    "contrib.sophia": lambda: contrib.sophia(1e-3),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(adam),
    # Not of optax: what else people wrap.
    "optax.flatten(compress(adam))": lambda: adam,
}

# The links that the optimizers above are made of: traced, but not trained again.
LINKS: dict[str, Callable[[], Any]] = {
    **{
        f"scale_by_{name}": getattr(optax, f"scale_by_{name}")
        for name in (
            *("adadelta", "adam", "adamax", "adan", "amsgrad", "belief"),
            *("distance_over_gradients", "lion", "novograd", "optimistic_gradient", "radam"),
            *("rms", "rss", "sm3", "yogi"),
        )
    },
    **{
        f"contrib.scale_by_{name}": getattr(contrib, f"scale_by_{name}")
        for name in ("acprop", "ademamix", "adopt", "cocob", "simplified_ademamix")
    },
    "scale_by_rprop": lambda: optax.scale_by_rprop(1e-3),
    "contrib.scale_by_galore": lambda: contrib.scale_by_galore(rank=32),
    "contrib.scale_by_madgrad": lambda: contrib.scale_by_madgrad(1e-2),
    "contrib.scale_by_muon": lambda: optax.partition(
        {
            "matrix": contrib.scale_by_muon(weight_dimension_numbers=muon_dimensions),
            "vector": adam,
        },
        labels,
    ),
}

# What stores nothing that follows a parameter: one step.
STATELESS: dict[str, Callable[[], Any]] = {
    **{
        name: getattr(optax, name)
        for name in (
            *("centralize", "identity", "keep_params_nonnegative", "normalize_by_update_norm"),
            *("polyak_sgd", "scale_by_param_block_norm", "scale_by_param_block_rms"),
            *("scale_by_polyak", "scale_by_sign", "scale_by_trust_ratio", "set_to_zero"),
            "zero_nans",
        )
    },
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.1, 0),
    "clip": lambda: optax.clip(1.0),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(1.0),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "freeze": lambda: optax.freeze(
        {"up": False, "up_bias": True, "down": False, "down_bias": True}
    ),
    "fromage": lambda: optax.fromage(1e-2),
    "scale": lambda: optax.scale(0.1),
    "scale_by_backtracking_linesearch": lambda: optax.scale_by_backtracking_linesearch(
        5, store_grad=True
    ),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(0.1),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda step: 0.1),
    "scale_by_zoom_linesearch": lambda: optax.scale_by_zoom_linesearch(5),
    "sign_sgd": lambda: optax.sign_sgd(0.1),
    "stateless": lambda: optax.stateless(lambda updates, params: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: u),
    "contrib.differentially_private_aggregate": lambda: contrib.differentially_private_aggregate(
        1.0, 0.01, 0
    ),
    "contrib.hutchinson_estimator_diag_hessian": lambda: contrib.hutchinson_estimator_diag_hessian(
        key
    ),
    "contrib.normalize": contrib.normalize,
    "contrib.reduce_on_plateau": contrib.reduce_on_plateau,
}

# What compress refuses.
REFUSED: dict[str, Callable[[], Any]] = {
    "flatten": lambda: optax.flatten(adam),
    "lbfgs": optax.lbfgs,
    "scale_by_stddev": lambda: scaled(1e-3, optax.scale_by_stddev()),
    "rmsprop(centered=True)": lambda: optax.rmsprop(1e-3, centered=True),
    "scale_by_lbfgs": optax.scale_by_lbfgs,
    "coat_jax.optax.fp8_adamw": lambda: coat.optax.fp8_adamw(3e-3, storage=STORAGE),
    "coat_jax.optax.compress": lambda: coat.optax.compress(adam, storage=STORAGE),
}
# Not transformations of updates by themselves.
EXCLUDED = {
    "measure_with_ema": "used in optax.monitor, whose state changes its structure in the first "
    "step, so that neither jax.lax.scan nor compress takes it",
}
# Transformations that take some extra arguments and refuse the others.
NEEDED: dict[str, tuple[str, ...]] = {
    "contrib.sam": (),
    "scale_by_backtracking_linesearch": ("value", "grad", "value_fn"),
    "scale_by_zoom_linesearch": ("value", "grad", "value_fn"),
}
PER_EXAMPLE = ("contrib.dpsgd", "contrib.differentially_private_aggregate")
