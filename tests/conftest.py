"""Eight devices on the CPU, the same examples of property tests on every run, and two options.

`-m gpu` asks for the suite of a GPU: it runs on the GPU, and fails where there is none.

The variables must be set before JAX starts its backends; one that is set already is kept.
"""

import ctypes
import gc
import os
import resource
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import quick
from hypothesis import Phase, settings
from suites import ENDINGS, NEEDED, SUITES

# XLA's CUDA plugin looks for CUDA's libraries, which compiling does not need.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# Programs do not say which lines of Python they come from: that is a thirtieth of the time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# XLA's threads. A collective blocks one, and each device may have several at once: with as many
# threads as devices all may wait, each for another collective.
os.environ.setdefault("NPROC", "32")
DEVICES = "--xla_force_host_platform_device_count=8"
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# Bytes of a worker: all together leave most of the machine to others.
MEMORY = max(2 << 30, os.sysconf("SC_PHYS_PAGES") * resource.getpagesize() // (3 * WORKERS))
OPTIMIZATION = "--xla_backend_optimization_level"


def add_to_xla_flags(flags: str) -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


if DEVICES.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
    add_to_xla_flags(DEVICES)

# A suite that runs under `nohup` inherits SIGHUP ignored, and hands that on to the runs it starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tracing makes many objects that live long; to look for cycles among them is a tenth of the time.
gc.set_threshold(100_000, 20, 100)

settings.register_profile(
    "laws",
    derandomize=True,
    deadline=None,
    max_examples=10,
    # All but `explain`, which traces every line and takes seconds for each failure.
    phases=[Phase.explicit, Phase.generate, Phase.target, Phase.shrink],
)
settings.load_profile("laws")


@pytest.fixture(autouse=True, scope="session")
def programs_are_compiled_quickly() -> None:
    quick.share_contexts()
    quick.no_keys_without_a_cache()


@pytest.fixture(autouse=True, scope="module")
def programs_are_given_back() -> Iterator[None]:
    """Frees compiled programs after a module if memory is above MEMORY; else workers reach 5 GB.

    It takes two seconds, and many are compiled once more: a tenth of the suite, done at each 2 GB.
    """
    yield
    pages = Path("/proc/self/statm")
    if pages.exists() and int(pages.read_text().split()[1]) * resource.getpagesize() > MEMORY:
        import jax

        jax.clear_caches()
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="a test or module that would be skipped fails: for suites that are run on purpose",
    )
    parser.addoption(
        "--cases",
        choices=("last-of-costly", "last-of-others"),
        help="which cases of tests with parameters run: of those marked costly the last one alone; "
        "or the last one of each test that is not costly. Lists begin with the plainest case",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out modules that cannot have a test of the suite that is asked for.

    Without its library a module is left out, too; with `--no-skips` it is imported, and fails. None
    of these modules has a test for a GPU.
    """
    if collection_path.name.startswith("test_"):
        suite = config.getoption("markexpr").partition(" ")[0]
        if suite in SUITES and suite not in collection_path.read_text("utf-8"):
            return True
    ending = collection_path.stem.rpartition("_")[2]
    if ending in ENDINGS and f"not {ENDINGS[ending]}" in config.getoption("markexpr"):
        return True
    library = NEEDED.get(ending)
    if library is not None and asks_for_gpu(config):
        return True
    if library is None or config.getoption("--no-skips") or find_spec(library):
        return None
    return True


def asks_for_gpu(config: pytest.Config) -> bool:
    return config.getoption("markexpr").startswith("gpu")


def pytest_configure(config: pytest.Config) -> None:
    on_gpu = asks_for_gpu(config)
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if on_gpu else "cpu")
    # Processes that tests start inherit it. What is compiled for GPUs is compiled as for users.
    if os.environ["JAX_PLATFORMS"] == "cpu" and OPTIMIZATION not in os.environ["XLA_FLAGS"]:
        add_to_xla_flags(quick.FLAGS)
    if on_gpu or config.getoption("--no-skips"):
        config.pluginmanager.register(NoSkips(), "no-skips")


@pytest.hookimpl(trylast=True)  # of the cases that -m and -k have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    which = config.getoption("--cases")
    last = {item.nodeid.partition("[")[0]: item for item in items}

    def is_left_out(item: pytest.Item) -> bool:
        costly = item.get_closest_marker("costly") is not None
        is_last = item is last[item.nodeid.partition("[")[0]]
        chosen = {"last-of-costly": is_last or not costly, "last-of-others": is_last and not costly}
        return not chosen.get(which, True)

    left_out = {item for item in items if is_left_out(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


class NoSkips:
    """Makes of each skipped test or module a failed one."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item):
        report = yield
        if report.skipped and not hasattr(report, "wasxfail"):
            report.outcome = "failed"
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector):
        report = yield
        if report.skipped:
            report.outcome = "failed"
        return report
