"""Which pages of the KV cache are free; knows nothing of what is in them, nor of torch."""


class PageAllocator:
    """Hands out page numbers ``1 .. num_pages``; page 0 is where rows that belong to nobody write."""

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
        if missing > len(self._free):
            return False
        pages.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, pages: list[int]) -> None:
        """Take ``pages`` back and empty the list."""
        self._free.extend(reversed(pages))
        pages.clear()
