"""Starts programs in forks of one process that has imported the trainer, which takes seconds.

That process is the fork server of multiprocessing. It imports and forks, and does nothing else: it
has no backend of JAX, and none of its threads.
"""

import atexit
import multiprocessing
import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from io import TextIOWrapper
from unittest import mock

from processes import environment

# JAX reads these when it is imported, so that they are the same for all programs.
VARIABLES = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0, "TF_CPP_MIN_LOG_LEVEL": 3}
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["coat_jax.cli.train", "coat_jax.training.loop", "grain", "pytest"])


class Fork(CONTEXT.Process):
    """`python ARGUMENTS`, and what tests need of `subprocess.Popen`."""

    def __init__(self, arguments, **variables):
        super().__init__(daemon=True)
        self.arguments = [str(argument) for argument in arguments]
        self.variables = environment(**VARIABLES, **variables)
        pipes = [CONTEXT.Pipe(duplex=False) for _ in ("stdout", "stderr")]
        self.ends = [theirs for _, theirs in pipes]
        with mock.patch.dict(os.environ, self.variables):  # of the server, if this is the first
            self.start()
        self.stdout, self.stderr = (os.fdopen(os.dup(ours.fileno())) for ours, _ in pipes)
        for end in sum(pipes, ()):
            end.close()

    @property
    def returncode(self):
        return self.exitcode

    def wait(self, timeout=None):
        self.join(timeout)
        return self.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self, timeout=None):
        """All that it prints from now on, and its errors."""
        streams = (self.stdout, self.stderr)
        with self.stdout, self.stderr, ThreadPoolExecutor() as threads:
            try:
                said = [*threads.map(TextIOWrapper.read, streams, timeout=timeout)]
            except TimeoutError:
                self.kill()
                raise
        self.join(timeout)
        return said

    def run(self):
        """Goes on in the fork as `python ARGUMENTS` would."""
        os.environ.clear()
        os.environ.update(self.variables)
        for number, name, end in zip((1, 2), ("stdout", "stderr"), self.ends, strict=True):
            os.dup2(end.fileno(), number)
            end.close()
            # The old stream believes that it writes to a file in which it can seek.
            setattr(sys, name, os.fdopen(number, "w", buffering=1, encoding="utf-8"))
        first, *sys.argv = self.arguments
        try:
            if first == "-m":
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                sys.argv.insert(0, first)
                runpy.run_path(first, run_name="__main__")
        finally:
            atexit._run_exitfuncs()  # JAX's among them, which multiprocessing leaves out
