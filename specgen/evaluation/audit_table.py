"""The losslessness audit as plain text for a terminal."""

from collections.abc import Mapping
from typing import Any

from specgen.config import DraftLength
from specgen.display import DASH, clip, count, percent, plain, table
from specgen.report.tables import joined

_SHOWN = 20  # divergences; the JSON document has all
_COLUMNS = (
    *("request", "arm", "batch", "at", "reference", "logit", "instead", "logit"),
    *("gap", "rounding", ""),
)


def render(audit: Mapping[str, Any]) -> str:
    """What ``Audit.to_json`` gave; ends with one plain sentence and a line break."""
    return joined([_heading(audit), _arms(audit), _divergences(audit), [verdict(audit)]])


def verdict(audit: Mapping[str, Any]) -> str:
    """One sentence: did anything change, and can rounding explain it."""
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


def _heading(audit: Mapping[str, Any]) -> list[str]:
    engine, reference, failures = audit["manifest"]["engine"], audit["reference"], audit["failures"]
    drafts = DraftLength(most=engine["num_spec_tokens"], auto=engine["spec_length"] == "auto")
    return [
        f"model {engine['model']}",
        f"drafter {engine['drafter']}, draft tokens (K) {drafts}",
        f"runs on {engine['device']}, {engine['dtype']}, attention {engine['attention']}",
        f"compared with {reference['name']} decoding, batch {reference['batch_size']}, greedy",
        *([f"{count(len(failures))} prompts could not be run and are not compared"] if failures else []),
    ]


def _arms(audit: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            arm["name"],
            count(arm["batch_size"]),
            count(arm["num_requests"]),
            count(arm["num_identical"]),
            percent(arm["identical"]),
            plain(arm["mean_acceptance_length"]),
        )
        for arm in audit["arms"]
    ]
    return table(("arm", "batch", "requests", "identical", "share", "acceptance length"), rows)


def _divergences(audit: Mapping[str, Any]) -> list[str]:
    """Those that nothing explains first."""
    found = [(arm, each) for arm in audit["arms"] for each in arm["divergences"]]
    found.sort(key=lambda pair: pair[1]["explained"])
    if not found:
        return []
    lines = table(_COLUMNS, [_row(arm, each) for arm, each in found[:_SHOWN]])
    more = len(found) - _SHOWN
    return [*lines, f"and {count(more)} more; --json and --output have all"] if more > 0 else lines


def _row(arm: Mapping[str, Any], divergence: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        clip(divergence["request"], 16),
        arm["name"],
        count(arm["batch_size"]),
        count(divergence["position"]),
        shown_token(divergence["reference_token"], divergence["reference_text"]),
        _number(divergence["reference_logit"]),
        shown_token(divergence["token"], divergence["text"]),
        _number(divergence["logit"]),
        _number(divergence["gap"]),
        _number(divergence["rounding"]),
        "rounding" if divergence["explained"] else "WRONG",
    )


def shown_token(token: int | None, text: str) -> str:
    """A token and its text, or that the text has ended."""
    return "(ended)" if token is None else f"{token} {clip(repr(text), 12)}"


def _number(number: float | None) -> str:
    return DASH if number is None else f"{number:.4g}"
