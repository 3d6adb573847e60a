"""The error that a user can fix."""

from typing import ClassVar


class UserError(ValueError):
    """Bad input: the message says what arrived, what is required and how to get there.

    A command prints the message as one line and ends with `exit_code`. Any other exception is a
    bug, or a failure of the machine, and shows its traceback.
    """

    exit_code: ClassVar[int] = 2
