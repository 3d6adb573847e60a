"""Compiles a function as one program even when it is called outside of `jit`.

Outside of `jit`, JAX compiles each operation of a function as a separate program: rounding an array
to blocks would compile thirty. Inside `jit` nothing changes.
"""

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import jax

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def one_program(
    *arrays: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Compiles a function as one program; all arguments except `arrays` are static."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        static = [name for name in inspect.signature(function).parameters if name not in arrays]
        return cast(
            Callable[Arguments, Result],
            jax.jit(function, static_argnames=static, inline=True),
        )

    return decorate
