"""The fingerprint of a checkpoint: by it a run knows its weights again, wherever they are."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specgen.checkpoints.tensor_reader import Checkpoint, files_in
from specgen.config import UserError
from specgen.storage import StoredObject, file_digest

_READERS = 8


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 over the contents of the weight files, the configs and the tokenizer's files.

    The digest of a large file is kept, and used as long as its inode, size and times are the same.
    """
    total = hashlib.sha256()
    for name, file in files_of(checkpoint).items():
        total.update(f"{name} {file['sha256']}\n".encode())
    return total.hexdigest()


def files_of(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """The files that ``fingerprint`` is over, by name: size, when it was changed, and SHA-256."""
    found = sorted(files_in(checkpoint.path, checkpoint.tensors))
    with ThreadPoolExecutor(_READERS) as readers:
        return {
            file.name: state_of(file) | {"sha256": digest}
            for file, digest in zip(found, readers.map(_digest_of, found), strict=True)
        }


def state_of(file: Path | StoredObject) -> dict[str, Any]:
    """By what a person knows a file again: its size, and when it was changed."""
    if isinstance(file, StoredObject):
        size, time = file.size, file.changed or datetime.fromtimestamp(0, UTC)
    else:
        found = file.stat()
        size, time = found.st_size, datetime.fromtimestamp(found.st_mtime, UTC)
    return {"bytes": size, "changed": time.isoformat(sep=" ", timespec="seconds")}


def _digest_of(file: Path) -> str:
    try:
        return file_digest(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): give it read permission") from error
