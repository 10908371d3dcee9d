"""The pages of the KV cache: which are free, and which are known by what they hold; no torch.

Prompts that begin alike are computed once: automatic prefix caching. Also slots of states, and places of automata.
"""

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat, takewhile


def extend_digests(digests: list[bytes], tokens: Sequence[int], page_size: int, root: bytes) -> None:
    """Bring ``digests`` up to ``tokens``: digest i names all tokens of pages 0 to i, and the token behind them.

    The head's KV at a position depends on the token that follows it, so a page is another one where that token is:
    then target and head can both take a page as it is, and nothing is left to be repaired at the border. ``root`` keeps
    apart what is computed in different ways.
    """
    for page in range(len(digests), (len(tokens) - 1) // page_size):
        before = digests[-1] if digests else root
        own = array("q", tokens[page * page_size : (page + 1) * page_size + 1])
        digests.append(hashlib.blake2b(before + own.tobytes(), digest_size=16).digest())


def common_digests(
    digests: list[bytes], known: Sequence[int], tokens: Sequence[int], page_size: int
) -> list[bytes]:
    """Those of ``digests``, of the text ``known``, that are of ``tokens`` too, where both have one root.

    Prompts behind one long prefix follow each other, and to compare it takes a fifth of what hashing it does.
    """
    same, most = 0, min(len(digests), (len(tokens) - 1) // page_size)
    while same < most:
        tried = (same + most + 1) // 2
        part = slice(same * page_size, tried * page_size + 1)  # a page is named with the token behind it
        if known[part] == tokens[part]:
            same = tried
        else:
            most = tried - 1
    return digests[:same]


def window_pages(window: int, rows: int, page_size: int) -> int:
    """Pages that hold ``rows`` positions and those before that the first of them sees, wherever pages begin."""
    return (window + rows + page_size - 3) // page_size + 1


class PageAllocator:
    """Hands out page numbers ``1 .. num_pages``; page 0 is where padding rows write.

    Where the layers that are stored in them have a ``window``, a row sees no position that is so far before its own:
    the list of a sequence's pages has 0 in place of those that none of its rows will see any more (``slide``).

    All whose digests begin alike are given the same pages; with ``prefix_cache`` every text has digests. A page that is
    no longer in use stays known until it is needed for something else; the longest unused go first, and of one text the
    last. (Automatic prefix caching of vLLM, whose pages are keyed by their own tokens alone.)
    """

    def __init__(
        self, num_pages: int, page_size: int, *, prefix_cache: bool = False, window: int | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.window = window
        self.prefix_cache = prefix_cache
        self._free = list(range(num_pages, 0, -1))
        self._num_users = [0] * (num_pages + 1)
        self._page_of: dict[bytes, int] = {}
        self._expected: dict[bytes, int] = {}  # pages that the pass in the making computes
        self._digest_of: dict[int, bytes] = {}
        self._unused: dict[int, None] = {}  # known pages without users, the longest unused first

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free) + len(self._unused)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def room(self, num_sequences: int, rows: int) -> int:
        """Tokens that each of so many sequences may have, behind which a pass writes ``rows``."""
        each, size = self.num_pages // num_sequences, self.page_size
        if self.window is not None and each >= window_pages(self.window, rows + 1, size):
            return sys.maxsize
        return each * size - rows

    def reach(self, pages: Sequence[int]) -> int:
        """Positions that ``pages`` hold once they have been given all that are free."""
        return (len(pages) + self.num_free) * self.page_size

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Extend ``pages`` until they hold ``num_tokens`` positions; False, and nothing taken, if too few are free."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > self.num_free:
            return False
        pages.extend(self._take() for _ in range(missing))
        return True

    def slide(self, pages: list[int], position: int) -> None:
        """Take back those of ``pages`` that no row from ``position`` on sees.

        They may be given out at once: what has them next writes behind all passes that were launched.
        """
        index = self._first_seen(position) - 1
        while index >= 0 and pages[index]:
            self._give_back(pages[index])
            pages[index] = 0
            index -= 1

    def release(self, pages: list[int]) -> list[int]:
        """Take ``pages`` back and empty the list; returns those that no sequence has any more."""
        given = [pages.pop() for _ in range(len(pages))]
        return [page for page in given if page and self._give_back(page)]

    @property
    def unused(self) -> list[int]:
        """Pages that no sequence has."""
        return [page for page in range(1, self.num_pages + 1) if not self._num_users[page]]

    def num_known(self, digests: Sequence[bytes], before: int = 0) -> int:
        """Behind how many of the first pages of a text, by ``extend_digests``, a sequence can begin, about.

        Somebody has computed all that it would see of them. ``before`` is what this has said of the text before: if the
        last of those pages is still known, so are, as a rule, those in front of it, and only what may have come since
        is looked up.
        """
        if self.window is not None:
            border = page = len(digests)
            while page > self._first_seen(border * self.page_size):
                page -= 1
                border = border if self._known(digests[page : page + 1]) else page
            return border
        first = before if self._known(digests[before - 1 : before]) else 0
        return first + len(self._known(digests[first:]))

    def reuse(self, pages: list[int], digests: Sequence[bytes]) -> int:
        """Extend the empty ``pages`` by those pages; returns how many they are."""
        hidden = self._first_seen(len(digests) * self.page_size)
        known = self._known(digests[hidden:])
        for page in known:
            self._num_users[page] += 1
            self._unused.pop(page, None)
        pages += [0] * hidden + known
        return len(pages)

    def keep(self, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        """Remember that ``pages`` hold what ``digests`` name, as far as both go; what is known stays where it is."""
        for page, digest in zip(pages, digests, strict=False):
            if page and digest not in self._page_of and page not in self._digest_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest

    def expect(self, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        """The same of what the next pass computes, for those who are in it; it ends in one of the next two."""
        for page, digest in zip(pages, digests, strict=False):
            if page:
                self._expected.setdefault(digest, page)

    def confirm(self) -> None:
        """That pass is on its way: those behind it may have its pages too."""
        self.keep(list(self._expected.values()), list(self._expected))
        self._expected.clear()

    def drop_expected(self) -> None:
        """That pass has failed."""
        self._expected.clear()

    def forget(self) -> None:
        """Share no page any more: their contents may be wrong."""
        self._free.extend(self._unused)
        for known in (self._page_of, self._expected, self._digest_of, self._unused):
            known.clear()

    def _first_seen(self, position: int) -> int:
        """The first page that a row there sees."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.page_size

    def _known(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the first ``digests``, as far as all are known."""
        found = map(self._page_of.get, digests, repeat(0))
        known = list(takewhile(bool, found))  # of a long prefix most
        for digest in islice(digests, len(known), None):
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
        page = self._free.pop()
        self._num_users[page] = 1
        return page

    def _give_back(self, page: int) -> bool:
        """Whether no sequence has ``page`` now."""
        self._num_users[page] -= 1
        if self._num_users[page]:
            return False
        if page in self._digest_of:
            self._unused[page] = None
        else:
            self._free.append(page)
        return True


class StateSlots:
    """Hands out the slots ``1 .. num_slots`` of recurrent states; where there are none all sequences have slot 0.

    A slot that is free may hold a copy of the state behind a page, by the page's digest, until it is needed.
    """

    def __init__(self, num_slots: int | None) -> None:
        self._free = None if num_slots is None else list(range(num_slots, 0, -1))
        self._copies: dict[bytes, int] = {}  # the oldest first
        self._expected: dict[bytes, int] = {}  # copies that the pass in the making leaves

    @property
    def available(self) -> bool:
        """Whether one can be handed out now."""
        return self._free is None or bool(self._free or self._copies)

    def take(self) -> int:
        if self._free is None:
            return 0
        return self._free.pop() if self._free else self._copies.pop(next(iter(self._copies)))

    def num_known(self, digests: Sequence[bytes]) -> int:
        """Behind how many of these pages, at most, a sequence can begin: without states behind any."""
        if self._free is None:
            return len(digests)
        return next((n for n in range(len(digests), 0, -1) if digests[n - 1] in self._copies), 0)

    def copy_of(self, digest: bytes) -> int:
        """The slot with the state behind that page, until the pass in the making has begun; 0 without states."""
        return self._copies.get(digest, 0)

    def expects(self, digests: Sequence[bytes]) -> bool:
        """Whether the pass in the making leaves a copy behind one of these pages."""
        return not self._expected.keys().isdisjoint(digests)

    def expect(self, digest: bytes) -> int:
        """A slot for what that pass leaves behind the page; 0 where that is known, or none is free."""
        if self._free is None or not self.available or digest in self._copies or digest in self._expected:
            return 0
        return self._expected.setdefault(digest, self.take())

    def confirm(self) -> None:
        """That pass is on its way."""
        self._copies |= self._expected
        self._expected.clear()

    def forget(self) -> None:
        """No copy is of use, those of the pass in the making neither."""
        for known in (self._copies, self._expected):
            if self._free is not None:
                self._free.extend(known.values())
            known.clear()

    def give_back(self, slot: int) -> None:
        """Slot 0 is nobody's."""
        if self._free is not None and slot:
            self._free.append(slot)


@dataclass(kw_only=True, eq=False)
class Place:
    """Where the tables hold an automaton, and how many sequences need it there."""

    number: int  # its row of classes
    first: int  # its first entry among the successors
    size: int  # entries
    num_users: int = 0
    filled: bool = False  # whether the device has it

    @property
    def end(self) -> int:
        return self.first + self.size


class Places:
    """Hands out places in tables for ``most`` automata. Those that nobody needs stay until theirs is needed.

    Number 0 and entries 0 and 1 are of the automaton that allows everything.
    """

    def __init__(self, most: int, num_entries: int) -> None:
        self.most = most
        self.num_entries = num_entries  # of all that are there at a time
        self._places: OrderedDict[Hashable, Place] = OrderedDict()  # what was given back last comes last

    def take(self, automaton: Hashable, size: int) -> Place | None:
        """A place of ``size`` for as long as one more sequence needs it; None: not until others are given back."""
        place = self._places.get(automaton) or self._new(size)
        if place is not None:
            place.num_users += 1
            self._places[automaton] = place
        return place

    def give_back(self, automaton: Hashable) -> None:
        """One sequence fewer needs it."""
        self._places[automaton].num_users -= 1
        self._places.move_to_end(automaton)

    def _new(self, size: int) -> Place | None:
        while True:
            taken = sorted((each.first, each.end) for each in self._places.values())
            ends, begins = (
                [2, *(end for _, end in taken)],
                [*(first for first, _ in taken), 2 + self.num_entries],
            )
            gap = next((end for end, begin in zip(ends, begins, strict=True) if begin - end >= size), None)
            numbers = {*range(1, self.most + 1)} - {each.number for each in self._places.values()}
            if gap is not None and numbers:
                return Place(number=min(numbers), first=gap, size=size)
            unused = next((key for key, each in self._places.items() if not each.num_users), None)
            if unused is None:
                return None
            del self._places[unused]
