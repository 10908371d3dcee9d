"""Pages that are known by what they hold, so that prompts which begin alike are computed once."""

import hashlib
from array import array
from collections.abc import Sequence

from specgen.kv.pages import PageAllocator


def extend_digests(digests: list[bytes], tokens: Sequence[int], page_size: int, root: bytes) -> None:
    """Bring ``digests`` up to ``tokens``: digest i names all tokens of pages 0 to i, and the token behind them.

    The head's KV at a position depends on the token that follows it, so a page is another one where that token is:
    then target and head can both take a page as it is, and nothing is left to be mended at the border. ``root`` keeps
    apart what is computed in different ways.
    """
    for page in range(len(digests), (len(tokens) - 1) // page_size):
        before = digests[-1] if digests else root
        own = array("q", tokens[page * page_size : (page + 1) * page_size + 1])
        digests.append(hashlib.blake2b(before + own.tobytes(), digest_size=16).digest())


class PrefixCache(PageAllocator):
    """An allocator that hands pages to all who begin alike.

    A page that is no longer in use stays known until it is needed for something else; the longest unused go first,
    and of one text the last. (Automatic prefix caching of vLLM, whose pages are keyed by their own tokens alone.)
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._num_users = [0] * (num_pages + 1)
        self._page_of: dict[bytes, int] = {}
        self._expected: dict[bytes, int] = {}  # pages that the pass in the making computes
        self._digest_of: dict[int, bytes] = {}
        self._unused: dict[int, None] = {}  # known pages without users, the longest unused first

    @property
    def num_free(self) -> int:
        return super().num_free + len(self._unused)

    def num_known(self, digests: Sequence[bytes]) -> int:
        return len(self._known(digests))

    def reuse(self, pages: list[int], digests: Sequence[bytes]) -> int:
        known = self._known(digests)
        for page in known:
            self._num_users[page] += 1
            self._unused.pop(page, None)
        pages += known
        return len(known)

    def keep(self, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        """What is known already stays where it is."""
        for page, digest in zip(pages, digests, strict=False):
            if digest not in self._page_of and page not in self._digest_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest

    def expect(self, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        for page, digest in zip(pages, digests, strict=False):
            self._expected.setdefault(digest, page)

    def confirm(self) -> None:
        self.keep(list(self._expected.values()), list(self._expected))
        self._expected.clear()

    def drop_expected(self) -> None:
        self._expected.clear()

    def forget(self) -> None:
        self._free.extend(self._unused)
        for known in (self._page_of, self._expected, self._digest_of, self._unused):
            known.clear()

    def _known(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the first ``digests``, as far as all are known."""
        known: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest) or self._expected.get(digest)
            if page is None:
                break
            known.append(page)
        return known

    def _take(self) -> int:
        if not self._free:
            page = next(iter(self._unused))
            del self._unused[page], self._page_of[self._digest_of.pop(page)]
            self._free.append(page)
        page = super()._take()
        self._num_users[page] = 1
        return page

    def _give_back(self, page: int) -> bool:
        self._num_users[page] -= 1
        if self._num_users[page]:
            return False
        if page not in self._digest_of:
            return super()._give_back(page)
        self._unused[page] = None
        return True
