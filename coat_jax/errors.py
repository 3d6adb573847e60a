"""The error that a user can mend."""


class UserError(ValueError):
    """Bad input: the message says what arrived, what is required and how to get there.

    The commands end with one line and exit code 2 on it. Any other exception is a bug, or a
    failure of the machine, and shows its traceback.
    """
