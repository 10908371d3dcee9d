"""URLs of objects in stores, such as ``s3://bucket/run``, beside paths of this machine."""

import re
from pathlib import Path, PurePosixPath
from typing import Self

from specgen.config.errors import UserError, require

_SCHEME = re.compile(r"(?:\w+=)?([A-Za-z][A-Za-z0-9+.-]*)://")
_CONTAINERS = ("abfs", "abfss")  # which write CONTAINER@ACCOUNT, of which neither is a secret
_REMEDY = "leave them out, and give them to its library in the environment or in its own file"


class Url(str):
    """The address of an object, or of all below it; ``UserError`` for one that carries a secret."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        require_no_secrets(text)
        return super().__new__(cls, text.rstrip("/"))

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self}/{name}")

    @property
    def path(self) -> PurePosixPath:
        """What follows the scheme."""
        return PurePosixPath(self.partition("://")[2])


def is_url(text: object) -> bool:
    """Whether ``text`` is an address in a store: a path of this machine has no scheme, or ``file``."""
    return isinstance(text, Url) or (
        isinstance(text, str) and re.match(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*://", text) is not None
    )


def location(text: str) -> Path | Url:
    """What ``text`` names: a path of this machine, or a URL."""
    return Url(text) if is_url(text) else Path(text.removeprefix("file://"))


def require_no_secrets(text: str) -> None:
    """``UserError`` for a URL with a user and password or with a query, which it does not repeat.

    What a command line names is printed and recorded. Secrets of stores have slashes in them, so the user may reach
    beyond what looks like the host.
    """
    if (found := _SCHEME.match(text)) is None:
        return
    host, _, rest = text[found.end() :].partition("/")
    has_port = re.fullmatch(r"[^:@]*:\d+", host) is not None and "@" not in rest
    has_user = (":" in host and not has_port) or ("@" in host and found[1] not in _CONTAINERS)
    if has_user or "?" in text:
        part = "a user or a password" if has_user else "a query (?...)"
        raise UserError(
            f"the URL {found[1]}://... has {part} in it, which would be printed and recorded: {_REMEDY}"
        )


def without_secrets(text: str) -> str:
    """``text``, such as an error of a library, without what URLs in it may carry."""
    return re.sub(r"(://[^/\s?]*)\?\S*|(\S*://\S*?)\?\S*", r"\1\2", re.sub(r"://[^/@\s]*@", "://", text))


def refuse_url(name: str, value: object) -> None:
    """``UserError`` where the path ``value`` of the option ``name`` was written as a URL."""
    said = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)", str(value)) if isinstance(value, Path) else None
    require(
        said is None or said[1] == "file",
        f"{name} is a URL, {str(value).replace(':/', '://', 1)}, and this command takes a path of this machine here: "
        "name one, and copy it from or to the store",
    )
