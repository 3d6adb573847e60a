"""The lock on a run's folder: two runs never write in it at the same time.

    lock    locked with flock by the run's first process; its text says which process that is

The kernel holds the lock and releases it when the process ends, however it ends: a lock file that
was left behind locks nothing. On NFS the server holds it. The other processes of a distributed run
need no lock: they write only when the first one tells them to.
"""

import datetime
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from coat_jax.errors import UserError
from coat_jax.files import expanded
from coat_jax.printable import printable
from coat_jax.writing import is_at, write_failures

FILE = "lock"
# The errors of file systems without locks.
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def lock(folder: str | Path, note: Callable[[str], object]) -> TextIO:
    """Locks a folder until the returned file is closed.

    Args:
        folder: of a run.
        note: called with a line if the file system has no locks.

    Raises:
        UserError: if another process holds the lock, saying which, or something that is no regular
            file has its name.
    """
    folder = expanded(folder)
    path = folder / FILE
    while True:
        # A link is not followed: the file is overwritten.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UserError(
                f"{path} is a pipe or a device, and a run has a file there: move it away, or "
                "choose another folder with --out."
            )
        file = os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = printable(" ".join(file.read(200).split())) or "another process"
            file.close()
            raise UserError(
                f"{folder} is in use by {holder}. Wait until that run has ended or stop it, or "
                "choose another folder with --out."
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            note(f"The file system of {folder} has no locks: let only one run use the folder.")
        if is_at(path, file):
            break
        file.close()  # the folder was moved away since it was opened
    with write_failures(folder, "The lock file"):
        file.truncate(0)
        now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, which began at {now}\n")
        file.flush()
    return file
