"""Who leads on a data set and by how much, or that there is no significant difference, in sentences."""

from collections.abc import Iterator, Sequence

from specgen.comparing.head_figures import Comparison, HeadPair, told
from specgen.display import between, p_value, plain


def leader(found: Comparison, data: str) -> str:
    """The head with the highest mean acceptance length on ``data``."""
    return max(_heads(found, data), key=lambda head: _length(found, data, head))


def leads(found: Comparison, data: str) -> bool:
    """Whether the data tell the ``leader`` from every other head, of which there is one at least."""
    pairs = _against_leader(found, data)
    return bool(pairs) and all(told(pair.length) and _gain(pair, leader(found, data)) > 0 for pair in pairs)


def verdicts(found: Comparison) -> Iterator[str]:
    """A sentence on all data sets where there are several, then one for each; none for a single head."""
    compared = [data for data in found.runs.data if len(_heads(found, data)) > 1]
    if len(compared) > 1:
        yield _overall(found, compared)
    for data in compared:
        yield f"{data}: {_verdict(found, data)}"


def _overall(found: Comparison, compared: Sequence[str]) -> str:
    clear: dict[str, list[str]] = {}
    for data in compared:
        if leads(found, data):
            clear.setdefault(leader(found, data), []).append(data)
    parts = [
        f"{head} leads on {f'all {len(compared)} data sets' if len(sets) == len(compared) else _and(sets)}"
        for head, sets in clear.items()
    ]
    if unclear := [data for data in compared if not leads(found, data)]:
        where = "any data set" if len(unclear) == len(compared) else _and(unclear)
        parts.append(f"no significant difference on {where}")
    return f"In short: {'; '.join(parts)}."


def _verdict(found: Comparison, data: str) -> str:
    first, pairs = leader(found, data), _against_leader(found, data)
    above = [pair for pair in pairs if told(pair.length) and _gain(pair, first) > 0]
    others = [pair for pair in pairs if pair not in above]
    parts = []
    if above:
        each = _and([f"{_other(pair, first)} by {_difference(pair, first)}" for pair in above])
        parts.append(f"{first} leads {each}")
    if others:
        each = _and([f"{_other(pair, first)}, {_difference(pair, first)}" for pair in others])
        parts.append(f"no significant difference between {'it' if above else first} and {each}")
    return "; ".join(parts) + "."


def _other(pair: HeadPair, head: str) -> str:
    return pair.first if pair.ours == head else pair.ours


def _difference(pair: HeadPair, head: str) -> str:
    """``0.17 [0.11, 0.22] (p < 0.001)``, of ``head`` less the other."""
    if pair.length is None:
        return "no request has steps of both"
    paired = pair.length.paired
    if paired.num_groups < 2:
        return "one conversation is too few"
    if paired.interval is None:
        alike = f"{plain(_gain(pair, head))} in every conversation, so without an interval"
        return "every conversation has the same acceptance" if paired.difference == 0 else alike
    low, high = paired.interval
    p = p_value(pair.length.p)
    ends = (low, high) if pair.ours == head else (-high, -low)
    return f"{plain(_gain(pair, head))} {between(ends, plain)} (p {p if p[0] == '<' else f'= {p}'})"


def _gain(pair: HeadPair, head: str) -> float:
    """The length of ``head`` less that of the other, over their shared requests."""
    assert pair.length is not None
    return pair.length.paired.difference * (1 if pair.ours == head else -1)


def _heads(found: Comparison, data: str) -> list[str]:
    return [run.head for run in found.runs.runs if run.data == data]


def _length(found: Comparison, data: str, head: str) -> float:
    length = found.length(data, head)
    return 1.0 if length is None else length.value  # no text has a second token


def _against_leader(found: Comparison, data: str) -> list[HeadPair]:
    first = leader(found, data)
    others = (found.of(data, first, head) for head in _heads(found, data) if head != first)
    return [pair for pair in others if pair is not None]


def _and(parts: Sequence[str]) -> str:
    """``a, b and c``"""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
