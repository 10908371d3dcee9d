"""The fingerprint of a checkpoint: by it a run knows its weights again, wherever they are."""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from specgen.checkpoints.cache_files import CacheFiles
from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.checkpoints.weight_files import MASK_EMBEDDING, file_state
from specgen.config import UserError
from specgen.storage import StoredObject

BESIDES = (
    MASK_EMBEDDING,
    "*.json",
    "*.jinja",
    "*.model",
    "merges.txt",
)  # what is needed besides the weights; tokenizers among them
_LARGE = 64 << 20  # bytes of a file whose digest is kept: a core reads about 1.5 GB/s
_SETTLED = 60.0  # seconds since a file was changed, after which its times would tell of another change
_READERS = 8
_DIGESTS = CacheFiles(kind="digests", what="a file's digest")


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
    others = {file for pattern in BESIDES for file in checkpoint.path.glob(pattern) if file.is_file()}
    found = sorted(others.union(checkpoint.files))
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
        return _digest(file.absolute(), file_state(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): give it read permission") from error


@lru_cache(maxsize=4096)
def _digest(file: Path, state: tuple[int, ...]) -> str:
    """SHA-256 of ``file``, read once as long as its ``state`` is the same: a comparison asks for every run."""
    _, _, size, *times = state
    is_settled = max(times) < (time.time() - _SETTLED) * 1e9
    if size < _LARGE or not is_settled:
        return _read(file)
    known = [str(file), *state]

    def same(found: Any) -> str | None:  # noqa: ANN401
        digest = found["sha256"]
        if not (isinstance(digest, str) and len(bytes.fromhex(digest)) == 32):
            return None
        return digest if found["file"] == known else ""

    digest = _DIGESTS.read(os.fsencode(file), same)
    if not digest:
        digest = _read(file)
        _DIGESTS.write(os.fsencode(file), {"file": known, "sha256": digest})
    return digest


def _read(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
