"""Experiments run each framework in a process of its own; what such a worker says when it fails."""

import re

ERROR = re.compile(r"[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*")


def reason(stderr: str) -> str:
    """The error that ended a worker: the last line of its traceback, not the advice after it."""
    lines = stderr.strip().splitlines()
    errors = [line for line in lines if ERROR.fullmatch(line)]
    return (errors or lines or ["no message"])[-1]
