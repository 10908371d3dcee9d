"""The losslessness audit as tables for the terminal."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specgen.config import DraftLength
from specgen.display import DASH, clip, count, devices, percent, plain, several
from specgen.report.table import Column, Row, Table
from specgen.report.terminal import ALARMING, Part

_SHOWN = 20  # divergences; the JSON document has all


def four_digits(number: float | None) -> str:
    """``0.01234``"""
    return DASH if number is None else f"{number:.4g}"


_ARMS = (
    Column(name="name", title="arm"),
    Column(name="batch_size", title="batch"),
    Column(name="num_requests", title="requests"),
    Column(name="num_identical", title="identical"),
    Column(name="identical", title="share", show=percent),
    Column(name="mean_acceptance_length", title="acceptance length", show=plain),
)
_DIVERGENCES = (
    Column(name="request"),
    Column(name="arm", wraps=True),
    Column(name="position", title="at"),
    Column(name="reference"),
    Column(name="reference_logit", title="logit", show=four_digits),
    Column(name="instead"),
    Column(name="logit", show=four_digits),
    Column(name="gap", show=four_digits),
    Column(name="rounding", show=four_digits),
    Column(name="why", title=""),
)


def of_audit(audit: Mapping[str, Any]) -> Iterator[Part]:
    """What the terminal shows of ``Audit.to_json()``, the verdict at the end."""
    yield _heading(audit)
    yield Table(title="Arms", columns=_ARMS, rows=tuple(audit["arms"]))
    rows = _places(audit["arms"])
    rows.sort(key=lambda row: row["explained"])  # unexplained ones first
    yield divergences(rows[:_SHOWN])
    if (more := len(rows) - _SHOWN) > 0:
        yield f"and {count(more)} more; --json and --output have all"
    yield verdict(audit)


def _places(arms: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for every place where arms diverge in the same way, which have one context and so one gap."""
    places: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, list[str]]]] = {}
    for arm in arms:
        for each in arm["divergences"]:
            place = tuple(each[name] for name in ("request", "position", "reference_token", "token"))
            _, batches = places.setdefault(place, (each, {}))
            batches.setdefault(arm["name"], []).append(str(arm["batch_size"]))
    return [
        {**each, "arm": "; ".join(f"{name} {', '.join(sizes)}" for name, sizes in batches.items())}
        for each, batches in places.values()
    ]


def divergences(found: Iterable[Row]) -> Table:
    """A table of ``Divergence`` fields with ``explained`` and ``arm``."""
    rows = [
        {
            **row,
            "reference": shown_token(row["reference_token"], row["reference_text"]),
            "instead": shown_token(row["token"], row["text"]),
            "why": "rounding" if row["explained"] else "WRONG",
            ALARMING: not row["explained"],
        }
        for row in found
    ]
    columns = tuple(column for column in _DIVERGENCES if all(column.name in row for row in rows))
    return Table(title="Divergences", columns=columns, rows=tuple(rows), num_keys=2)


def verdict(audit: Mapping[str, Any]) -> str:
    """One sentence: did any text change, and does rounding explain it."""
    total = sum(arm["num_requests"] for arm in audit["arms"])
    differ = total - sum(arm["num_identical"] for arm in audit["arms"])
    if differ == 0:
        return f"Nothing changed: all {count(total)} texts are those of the reference, token for token."
    found = f"{count(differ)} of {count(total)} texts differ from the reference"
    if (wrong := audit["num_unexplained"]) == 0:
        return f"{found}, each first where the two tokens are so close that rounding to {audit['dtype']} decides."
    return (
        f"{found}, {count(wrong)} of them where rounding to {audit['dtype']} cannot explain it: "
        "decoding is wrong there."
    )


def _heading(audit: Mapping[str, Any]) -> str:
    engine, reference, failures = audit["manifest"]["engine"], audit["reference"], audit["failures"]
    drafts = DraftLength(most=engine["num_spec_tokens"], auto=engine["spec_length"] == "auto")
    where = devices(engine["device"], engine.get("tensor_parallel", 1))
    lines = [
        f"model {engine['model']}",
        f"drafter {engine['drafter']}, draft tokens (K) {drafts}",
        f"runs on {where}, {audit['dtype']}, attention {engine['attention']}",
        f"compared with {reference['name']} decoding, batch {reference['batch_size']}, greedy",
    ]
    lines += [f"{several(len(failures), 'prompt')} could not be run, not compared"] if failures else []
    return "\n".join(lines)


def shown_token(token: int | None, text: str) -> str:
    """``464 'The'``, or ``(ended)`` after the end of the text."""
    return "(ended)" if token is None else f"{token} {clip(repr(text), 12)}"
