"""Which pages of the KV cache are free; knows nothing of torch."""

from collections.abc import Sequence


class PageAllocator:
    """Hands out page numbers ``1 .. num_pages``; page 0 is where padding rows write.

    This one forgets what is in them; ``prefix_cache.PrefixCache`` does not.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` positions take."""
        return -(-num_tokens // self.page_size)

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Extend ``pages`` until they hold ``num_tokens`` positions; False, and nothing taken, if too few are free."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > self.num_free:
            return False
        pages.extend(self._take() for _ in range(missing))
        return True

    def release(self, pages: list[int]) -> list[int]:
        """Take ``pages`` back and empty the list; returns those that no sequence has any more."""
        given = [pages.pop() for _ in range(len(pages))]
        return [page for page in given if self._give_back(page)]

    def num_known(self, digests: Sequence[bytes]) -> int:
        """How many of the first pages of a text, by ``prefix_cache.extend_digests``, somebody has computed."""
        return 0

    def reuse(self, pages: list[int], digests: Sequence[bytes]) -> int:
        """Extend the empty ``pages`` by those pages; returns how many they are."""
        return 0

    def keep(self, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        """Remember that ``pages`` hold what ``digests`` name; as far as both go."""

    def expect(self, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        """The same of what the next pass computes, for those who are in it; it ends in one of the next two."""

    def confirm(self) -> None:
        """That pass is on its way: those behind it may have its pages too."""

    def drop_expected(self) -> None:
        """That pass has failed."""

    def forget(self) -> None:
        """Share no page any more: their contents may be wrong."""

    def _take(self) -> int:
        return self._free.pop()

    def _give_back(self, page: int) -> bool:
        """Whether no sequence has ``page`` now."""
        self._free.append(page)
        return True
