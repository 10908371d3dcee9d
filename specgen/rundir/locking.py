"""A lock on a directory: one process at a time."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from specgen.config import UserError
from specgen.rundir.atomic import naming

LOCK = ".lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Create ``directory`` if needed and lock it; ``UserError`` names the process that holds the lock.

    It is the kernel's lock on a file that stays, released when the process ends, however that happens.
    """
    with naming(directory):
        file = _hold(directory)
    with file:
        with naming(directory):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()} {socket.gethostname()}".encode())
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
            pass  # the directory was moved meanwhile, with the file just locked
        except BlockingIOError as error:
            raise UserError(
                f"output {str(directory)!r} is in use by {_holder(file)}: wait for it, or name another directory"
            ) from error
        file.close()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    pid, _, host = file.read().partition(" ")
    return f"process {pid} on {host}" if host else "another process"
