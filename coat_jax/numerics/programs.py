"""A function as one program, also where it is called outside of `jit`.

There, each operation of a function is a program of its own, which is compiled at its first call:
rounding an array to blocks would compile thirty. Inside a program nothing changes.
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
    """Makes one program of a function, for each value of its arguments but `arrays`."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        static = [name for name in inspect.signature(function).parameters if name not in arrays]
        return cast(
            Callable[Arguments, Result],
            jax.jit(function, static_argnames=static, inline=True),
        )

    return decorate
