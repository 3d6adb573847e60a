"""A text and a size of model for runs of studies that take seconds."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from experiments.loss_study import arms, training
from experiments.loss_study import text as texts
from experiments.study.study import Call, Job, Study


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a call with a prepared text in bytes, a quarter of which is prose."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    for number in range(100):
        letters = random.integers(97, 123, size=1000).astype(np.uint8)
        if number % 4:
            letters[::2] = random.choice(list(b" \n  .;"), size=500)
        (folder / f"{number}.md").write_bytes(bytes(letters))
    texts.prepare(folder / "work" / "text", texts.BYTES, places=[folder], limit=10**9)
    return folder / "work"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> arms.Size:
    """A size of the loss study that compiles in a second."""
    size = arms.SIZES["tiny"]
    model = dataclasses.replace(size.model, width=32, layers=1, heads=1, kv_heads=1, ffn=64)
    settings = dataclasses.replace(size.settings, steps=4, batch=4, sequence=32, held_out=4)
    size = dataclasses.replace(size, model=model, settings=settings)
    monkeypatch.setitem(arms.SIZES, "small", size)
    monkeypatch.setattr(training, "FORWARDS", {"bf16": arms.coat.BF16})
    return size


@pytest.fixture
def call_of(tmp_path: Path) -> Callable[..., Call]:
    """A call by what its command line says; its results are in a folder of their own."""
    from experiments.study import command

    def call(study: Study, *words: object) -> Call:
        parser = command.parser_of(study, "")
        options = parser.parse_args(["--work", str(tmp_path / "work"), *map(str, words)])
        return command.call_of(study, options, tmp_path / "known.json", tmp_path / "out.json")

    return call


@pytest.fixture
def job_of(work: Path, tmp_path: Path, call_of: Callable[..., Call]) -> Callable[..., Job]:
    """The job of the first run of a call at size "small"."""

    def job(study: Study, arm: str, *words: object, folder: str = "run", asked: object = ()) -> Job:
        call = call_of(study, "--size", "small", *words)
        (tmp_path / folder).mkdir(exist_ok=True)
        return Job(study.rows_of(call, arm, [0], "a text"), tmp_path / folder, work, asked)

    return job


class After(list):
    """Becomes true when it was asked so often, as a list does to which a signal's handler adds."""

    def __init__(self, often: int) -> None:
        super().__init__()
        self._often = often

    def __bool__(self) -> bool:
        self.append(0)
        return len(self) > self._often


@pytest.fixture
def after() -> type[After]:
    """`After`, for jobs that are asked to stop."""
    return After
