"""How many pages a KV cache has in so much memory, and how they are shared out between layers with and without windows.

Pages of layers with a window go back behind it, so that a sequence has few of them, however long it becomes.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from specgen.config import NGRAM_BYTES, EngineConfig
from specgen.core.packing import BLOCK
from specgen.engine.choices import DTYPES, RUNNERS, target_kv_dtype
from specgen.kv.pages import window_pages
from specgen.models.model_config import HeadConfig, TargetConfig

_SHORT, _LONG = 1024, 8192  # tokens of sequences between which the shares of memory are right


def rows_behind(config: EngineConfig) -> int:
    """Rows that a pass may write behind a sequence's tokens: those of a step, or of a block of a captured prompt."""
    return max(config.draft_length.most + 1, BLOCK if RUNNERS[config.cuda_graphs].captures else 0)


@dataclass(frozen=True, kw_only=True)
class PageBudget:
    """The pages of a resolved ``config`` for a target, or a rank's share of it, and what drafts.

    ``pages`` are those in all layers of target and head without a window, ``windowed`` those in the target's others.
    """

    config: EngineConfig
    target: TargetConfig
    head: HeadConfig | None

    @cached_property
    def window(self) -> int | None:
        """The longest of the target, and what a head sees behind it; None: no pages are windowed."""
        window = self.target.kv_spec.window
        return None if window is None else window + (0 if self.head is None else self.head.sees_behind)

    @cached_property
    def page_bytes(self) -> int:
        """Of a page in every layer, and of the texts that n-grams are looked up in."""
        config = self.config
        total = self.target.kv_spec.bytes_per_token(target_kv_dtype(config).itemsize)
        if config.head is not None and self.head is not None:
            total += self.head.kv_spec.bytes_per_token(DTYPES[config.dtype].itemsize)
        if config.lookup is not None:
            total += NGRAM_BYTES
        return config.page_size * total

    @cached_property
    def windowed_page_bytes(self) -> int:
        """Of them those in layers with a window."""
        width = target_kv_dtype(self.config).itemsize
        return self.config.page_size * self.target.kv_spec.windowed_bytes(width)

    def of_sequence(self, num_tokens: int) -> tuple[int, int]:
        """Pages and windowed ones that a sequence of ``num_tokens`` has at most, but for a piece of its prompt."""
        rows, window, size = rows_behind(self.config), self.window, self.config.page_size
        pages = -(-(num_tokens + rows) // size)
        # the rows of a step behind those of one that is in flight
        return pages, 0 if window is None else min(pages, window_pages(window, 2 * rows + 2, size))

    @property
    def most_pages(self) -> int:
        """What the largest batch of sequences of full length needs; by one page more layers with a window keep all."""
        most = self.config.max_batch_size * self.of_sequence(self.target.max_positions)[0]
        return most + (self.window is not None)

    def bytes_of(self, pages: int, windowed: int) -> int:
        """What so many take."""
        each = self.windowed_page_bytes
        return pages * (self.page_bytes - each) + windowed * each

    def windowed(self, pages: int) -> int:
        """How many there are beside ``pages``; 0 where no layer has a window.

        As many, where that is all the batch can need: a prefix cache then keeps all. Where memory is short, sequences
        of ``_SHORT`` and of ``_LONG`` tokens lose the same: a batch has the same part of those for which there were
        room if memory were shared out for them alone. There are no more then than the largest batch and a prefill can
        use, and no fewer than one sequence.
        """
        if self.window is None:
            return 0
        if pages >= self.most_pages:
            return pages
        config, context = self.config, self.target.max_positions
        short, long = (self.of_sequence(min(length, context)) for length in (_SHORT, _LONG))
        share = -(-pages * short[1] * self.bytes_of(*long) // (long[0] * self.bytes_of(*short)))
        _, most = self.of_sequence(context)
        useful = config.max_batch_size * most + -(-config.max_prefill_tokens // config.page_size)
        return min(pages, max(most, min(share, useful)))

    def bytes_with(self, pages: int) -> int:
        """Of ``pages`` and the windowed ones beside them."""
        return self.bytes_of(pages, self.windowed(pages))

    def within(self, memory: int) -> int:
        """The most pages that ``memory`` bytes hold, with the windowed ones beside them."""
        if self.window is None:
            return max(memory, 0) // self.page_bytes
        return bisect_right(range(1, max(memory, 0) + 1), memory, key=self.bytes_with)

    def for_sequences(self, lengths: Iterable[int]) -> int:
        """Pages of a cache that holds sequences of so many tokens together, those in layers with a window too."""
        each = [self.of_sequence(length) for length in lengths]
        pages = sum(many for many, _ in each)
        piece = -(-self.config.max_prefill_tokens // self.config.page_size)
        windowed = min(pages, sum(few for _, few in each) + piece) if self.window is not None else 0
        # at most ``_LONG`` pages have one windowed page beside them
        enough = range(pages, pages + _LONG * windowed)
        return pages + bisect_left(enough, windowed, key=self.windowed)
