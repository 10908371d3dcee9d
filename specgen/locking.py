"""One process at a time in a directory."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

LOCK = ".lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make ``directory`` if need be and hold it alone; ``ValueError`` naming the process that holds it already.

    The lock is the kernel's, on a file that stays: it ends with the process, however that ends.
    """
    with _hold(directory) as file:
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}")
        file.flush()
        yield


def _hold(directory: Path) -> IO[str]:
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(directory / LOCK)):
                return file
        except FileNotFoundError:
            pass  # the directory was moved away in between, with the file that is locked now
        except BlockingIOError as error:
            raise ValueError(
                f"output {str(directory)!r} is in use by {_holder(file)}: wait for it, or name another directory"
            ) from error
        file.close()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    pid, _, host = file.read().partition(" ")
    return f"process {pid} on {host}" if host else "another process"
