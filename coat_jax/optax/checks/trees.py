"""Checks of the parameters, gradients and states that optimizers get."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.qtensor import scales_shape
from coat_jax.storage import Storage
from coat_jax.validation import brief


def dtype_of(leaf: Any) -> Any:
    """The dtype of a leaf of a state: an array, a typed random key or a Python number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def is_fp8(leaf: Any) -> bool:
    """Whether a leaf holds FP8 codes."""
    dtype = dtype_of(leaf)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


def require_real_floats(params: Any) -> None:
    """Raises unless every parameter is a real floating-point array."""
    for path, leaf in jax.tree.leaves_with_path(params):
        require_real_float(jax.tree_util.keystr(path) or "the parameter", leaf)


def require_real_float(where: str, leaf: Any) -> None:
    """Raises unless a parameter is a real floating-point array."""
    dtype = dtype_of(leaf)
    if dtype == jax.dtypes.float0:
        raise TypeError(
            f"{where} has dtype float0, JAX's gradient of an integer parameter, to which nothing "
            "can be added. Pass zeros instead: jnp.zeros_like(parameter)."
        )
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{where} is complex ({dtype.name}), which 8-bit moments cannot hold. Wrap the "
            "optimizer in optax.contrib.split_real_and_imaginary."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{where} has dtype {dtype.name}; only floats are optimized. Leave it out with "
            "optax.masked or optax.partition."
        )
    if dtype.itemsize == 1:
        raise TypeError(
            f"{where} has dtype {dtype.name}, in which an update would be lost or overflow. Keep "
            "parameters and gradients in BF16 or FP32."
        )


def require_transformation(name: str, tx: Any) -> optax.GradientTransformation:
    """Returns the argument of the function `name`; raises unless it is an optax transformation."""
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        remedy = (
            "It is a whole step by itself: use tx instead of in_place(tx)."
            if callable(getattr(tx, "step", None))
            else f"Call the function that makes one: {name}(optax.lion(1e-4))."
        )
        raise TypeError(
            f"{name} takes an optax transformation, with init and update, not {described(tx)}. "
            f"{remedy}"
        )
    return tx


def described(optimizer: Any) -> str:
    """How errors describe a value passed as an optimizer: by its class if it is one."""
    return f"a {type(optimizer).__name__}" if hasattr(optimizer, "init") else brief(optimizer)


def require_state_of(kind: type, state: Any, advice: str = "Make it with init(params).") -> None:
    """Raises unless the state is of this kind."""
    if not isinstance(state, kind):
        raise TypeError(
            f"The state must be {_with_article(kind)}, but is {_with_article(type(state))}, which "
            f"another optimizer made. {advice}"
        )


@contextlib.contextmanager
def explaining_states(tx: optax.GradientTransformation, state: Any, params: Any) -> Iterator[None]:
    """Explains an error within, if the state differs from what `tx.init(params)` makes."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        difference = None
        with contextlib.suppress(Exception):  # some `init` need numbers, not only shapes
            difference = _difference(state, jax.eval_shape(tx.init, params))
        if difference is None:
            raise
        raise ValueError(
            f"{difference}: it was made by another transformation, or for other parameters. Make "
            "it with init(params)."
        ) from error


def _difference(state: Any, wanted: Any) -> str | None:
    """How a state differs from the one that is wanted, in structure or shapes."""
    structure: Any = jax.tree.structure(state)
    if structure != jax.tree.structure(wanted):
        return f"The state has the structure {structure}"
    for (path, leaf), other in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(wanted), strict=True
    ):
        if jnp.shape(leaf) != other.shape:
            name = f"state{jax.tree_util.keystr(path)}"
            return f"{name} has shape {jnp.shape(leaf)} instead of {other.shape}"
    return None


def _with_article(kind: type) -> str:
    article = "an" if kind.__name__.startswith(tuple("AEIO")) else "a"
    return f"{article} {kind.__name__}"


def require_same_structure(name: str, tree: Any, codes: Any) -> None:
    """Raises unless `tree` has the structure of `codes` (a state's, or parameters)."""
    expected: Any = jax.tree.structure(codes)
    got: Any = jax.tree.structure(tree)
    if expected != got:
        raise ValueError(
            f"The {name} have another structure than the parameters the state was made for.\n"
            f"  state: {expected}\n  {name}: {got}\n"
            "Make the state with tx.init(params) from the parameters that are differentiated."
        )


def require_same_shapes(name: str, tree: Any, codes: Any) -> None:
    """Raises unless `tree` has the structure and shapes of `codes` (a state's, or parameters)."""
    require_same_structure(name, tree, codes)
    for (path, leaf), stored in zip(
        jax.tree.leaves_with_path(tree), jax.tree.leaves(codes), strict=True
    ):
        if jnp.shape(leaf) != jnp.shape(stored):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}, but its state "
                f"was made for {jnp.shape(stored)}. Make the state anew with tx.init(params)."
            )


def require_moments(
    name: str,
    moment: Expanded,
    layout: Callable[[tuple[int, ...]], tuple[jax.ShapeDtypeStruct, ...]],
) -> None:
    """Raises unless the leaves of a moment are stored as `layout` says for their shapes."""
    leaves = [jax.tree.leaves_with_path(tree) for tree in moment]
    for arrays in zip(*leaves, strict=True):
        expected = layout(arrays[0][1].shape)
        for field, (path, array), wanted in zip(Expanded._fields, arrays, expected, strict=True):
            if (array.shape, array.dtype) != (wanted.shape, wanted.dtype):
                raise ValueError(
                    f"The state's {name}.{field}{jax.tree_util.keystr(path)} is "
                    f"{array.dtype}{list(array.shape)}, but its Storage asks for "
                    f"{wanted.dtype}{list(wanted.shape)}. It was made with another group size, "
                    "format or min_size: use the Storage it was made with. FP8 moments, which were "
                    "the default before, are Storage(first=E4M3, second=E4M3)."
                )


def require_stored(name: str, stored: Expanded, storage: Storage) -> None:
    """Raises unless a compressed leaf has the format and group size of `storage`."""
    groups = scales_shape(stored.codes.shape, storage.group_size)
    shapes = {stored.amax.shape, stored.exponent_x16.shape}
    if stored.codes.dtype != storage.other or shapes != {groups}:
        raise ValueError(
            f"The state's {name} is {stored.codes.dtype} with scales {list(stored.amax.shape)}, "
            f"but its Storage asks for {jnp.dtype(storage.other)} with scales {list(groups)}. It "
            "was made with another FP8 format or group size: use the Storage it was made with."
        )
