"""How long programs compile, the first time and from JAX's compilation cache.

    seconds()               {"cold_seconds": 41.2, "warm_seconds": 1.9}, of all programs of this
                            process and its workers
    compile_twice(lower)    a program, and how long it took to compile both times

Cold is what XLA compiled, warm is what JAX read from its cache instead; None if there was nothing.
`seconds` counts every program, but only XLA's part of the work. `compile_twice` measures what a run
waits for: JAX also traces and lowers the program, and Triton compiles its kernels.

Counting begins when JAX is imported (`begin`, which the package calls). This module does not import
JAX when it is imported: `command` says why.
"""

import contextlib
import importlib.abc
import importlib.util
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

EVENTS = "jax.monitoring"
COMPILED = "/jax/core/compile/backend_compile_duration"  # reading from the cache included
READ = "/jax/compilation_cache/cache_retrieval_time_sec"  # before it, if the cache has the program
KINDS = ("cold_seconds", "warm_seconds")

Seconds = dict[str, float | None]

_seconds: Seconds = dict.fromkeys(KINDS)
_adding = threading.Lock()
_of_thread = threading.local()


class Compiled(NamedTuple):
    """A program that was compiled twice.

    Attributes:
        program: the first one.
        compile_seconds: for tracing, lowering and compiling it.
        warm_compile_seconds: the same with XLA's part read from JAX's cache; None if JAX cannot
            read this program, as one for GPUs that are not there.
    """

    program: Any
    compile_seconds: float
    warm_compile_seconds: float | None

    def seconds(self, prefix: str = "") -> Seconds:
        """The fields of a results file."""
        return {
            f"{prefix}compile_seconds": self.compile_seconds,
            f"{prefix}warm_compile_seconds": self.warm_compile_seconds,
        }


def compile_twice(lower: Callable[[], Any]) -> Compiled:
    """Compiles what `lower()` returns, and then again from JAX's cache.

    A second process would also compile Triton's kernels again, or read them from a file; here they
    are still in memory. `gpu_suite` starts that process.
    """
    with _empty_cache():
        program, cold, _ = _compiled(lower)
        _, warm, was_read = _compiled(lower)
    return Compiled(program, cold, warm if was_read else None)


def _compiled(lower: Callable[[], Any]) -> tuple[Any, float, bool]:
    """A program, the seconds that it took, and whether JAX's cache had it."""
    import jax

    jax.clear_caches()  # those in memory
    begin = time.perf_counter()
    lowered = lower()
    before = _seconds["warm_seconds"]
    program = lowered.compile()
    return program, time.perf_counter() - begin, _seconds["warm_seconds"] != before


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    """Inside, JAX stores every program in a cache that is empty at first."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "jax_compilation_cache_dir": folder,
            "jax_enable_compilation_cache": True,
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_persistent_cache_min_entry_size_bytes": 0,
            # See coat_jax.kernels.cache_key.
            "jax_remove_custom_partitioning_ptr_from_cache_key": True,
        }
        before = {name: jax.config.values[name] for name in settings}
        try:
            for name, value in settings.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


# --- Counting --------------------------------------------------------------------------------


def begin() -> None:
    """Counts from now on, or from when JAX is imported."""
    if EVENTS in sys.modules:
        _listen(sys.modules[EVENTS])
    else:
        sys.meta_path.insert(0, _OnceImported())


def seconds() -> Seconds:
    """What was compiled until now, in this process and in those passed to `add`."""
    return dict(_seconds)


def add(other: Mapping[str, float | None]) -> None:
    """Counts what another process compiled."""
    with _adding:
        for kind in KINDS:
            if (more := other.get(kind)) is not None:
                _seconds[kind] = (_seconds[kind] or 0.0) + more


def are_seconds(found: Any) -> bool:
    """Whether this is what `seconds` returns: it may come from a damaged file."""
    return (
        isinstance(found, dict)
        and found.keys() == set(KINDS)
        and all(value is None or isinstance(value, int | float) for value in found.values())
    )


def _note(event: str, duration: float, **_: object) -> None:
    if event == READ:
        _of_thread.has_read = True
    elif event == COMPILED:
        kind = "warm_seconds" if getattr(_of_thread, "has_read", False) else "cold_seconds"
        _of_thread.has_read = False
        add({kind: duration})


def _listen(events: ModuleType) -> None:
    events.register_event_duration_secs_listener(_note)


class _OnceImported(importlib.abc.MetaPathFinder):
    """Finds JAX's module of events as Python does, and listens to them once it is loaded."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != EVENTS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _listen(module)
