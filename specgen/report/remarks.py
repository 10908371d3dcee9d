"""Sentences of a report about what its numbers do not show by themselves."""

from collections.abc import Iterator, Mapping
from typing import Any

from specgen.display import count

_FEW, _NEARLY_ALL = 10, 0.9  # texts, share of them
DEAD_LENGTH = 1.05  # tokens per verify step; plain decoding has 1


def remarks(report: Mapping[str, Any]) -> Iterator[str]:
    """What is to be said of a ``report.json``; nothing of an ordinary one."""
    return filter(
        None, (warning(report), cut_by_context(report), unanswered(report), empty(report), untold(report))
    )


def hint(report: Mapping[str, Any]) -> str:
    """What may be worth another run: nearly all texts of a ``report.json`` were cut off; empty if they were not."""
    ended = report["finish_reasons"]
    cut, number = ended.get("length", 0), sum(ended.values())
    if number < _FEW or cut < _NEARLY_ALL * number:
        return ""
    return (
        f"{count(cut)} of {count(number)} texts ended by length: acceptance further on may differ, and published "
        "figures are of 256 to 4,096 tokens. --max-new-tokens allows more."
    )


def warning(report: Mapping[str, Any]) -> str:
    """A warning about the acceptance rates of a ``report.json``; empty if there is none."""
    if report["num_spec_tokens"] == 0:
        return "Plain decoding: there are no drafts, so there is no acceptance to report."
    if report["num_drafts"] == 0:
        return "No verify step had drafts, so there is no acceptance to report."
    if report["mean_acceptance_length"] < DEAD_LENGTH:
        return (
            f"The drafter is dead: the mean acceptance length is under {DEAD_LENGTH}, so drafting costs time "
            "and gains nothing. `specgen inspect` says whether a head fits the target and how it was read; n-grams "
            "need text that repeats itself."
        )
    return ""


def cut_by_context(report: Mapping[str, Any]) -> str:
    """What a ``report.json`` says of texts that filled the model's context; empty if there are none."""
    ended = report["finish_reasons"]
    number = ended.get("context", 0)
    if not number:
        return ""
    return (
        f"{count(number)} of {count(sum(ended.values()))} texts ended where the model's context was full, before "
        "--max-new-tokens: shorten the prompts or ask for less."
    )


def unanswered(report: Mapping[str, Any]) -> str:
    """What a ``report.json`` says of texts that ended before their answer began; empty if there are none."""
    ended = report.get("ended_in_reasoning", {})
    number = sum(ended.values())
    if not number:
        return ""
    remedy = ": raise --max-new-tokens" if ended.get("length") else ""
    return f"{count(number)} {'answer' if number == 1 else 'answers'} ended while reasoning{remedy}."


def empty(report: Mapping[str, Any]) -> str:
    """What a ``report.json`` says of texts without a character; empty if there are none."""
    number = report.get("num_empty", 0)  # reports of earlier versions have none
    if not number:
        return ""
    return (
        f"{count(number)} of {count(report['num_requests'])} texts are empty: the model ended them at once. One "
        "that was trained on chats needs its chat template: rows with messages instead of prompt, in eval "
        "--apply-chat-template."
    )


def untold(report: Mapping[str, Any]) -> str:
    """What a ``report.json`` lacks for want of events."""
    if report.get("events") != "none":
        return ""
    return (
        "This run recorded no events (--events none): no speeds, latencies, steps, rows, cached tokens, or parts of "
        "texts are known. --events summary keeps them in little space."
    )
