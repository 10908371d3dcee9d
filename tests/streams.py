"""Hand-made event streams, for tests of reports, and the tables that sessions with such events leave."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from specgen.events import Event, Finished, Prefilled, Stepped, Submitted, Touched, Verified
from specgen.record.recorder import Pass, Recorder, RequestRow
from specgen.rundir.results import RunDirectory


def request(
    name: str,
    steps: Sequence[tuple[int, int]],
    *,
    begin: float = 0.0,
    category: str | None = None,
    turn: int = 1,
    dropped: int = 0,
) -> Iterator[Event]:
    """One request that verifies ``(drafted, accepted)`` once per second and drops that many tokens of the last step."""
    yield Submitted(sequence=name, time=begin, num_prompt_tokens=5, category=category, turn=turn)
    yield Prefilled(sequence=name, time=begin + 1, emitted=1, num_cached=0)
    num_tokens, now = 1, begin + 1
    for number, (drafted, accepted) in enumerate(steps, start=1):
        now += 1
        emitted = accepted + 1 - (dropped if number == len(steps) else 0)
        num_tokens += emitted
        drafts = tuple(range(drafted))
        yield Verified(sequence=name, time=now, drafts=drafts, accepted=accepted, emitted=emitted)
    yield Finished(sequence=name, time=now, reason="stop", num_output_tokens=num_tokens)


def begun(*names: str) -> Iterator[Event]:
    """Requests that have their first token."""
    for name in names:
        yield Submitted(sequence=name, time=0.0, num_prompt_tokens=5)
        yield Prefilled(sequence=name, time=0.5, emitted=1, num_cached=0)


def ended(*names: str, reason: str = "length") -> Iterator[Event]:
    """Requests that end, whatever they have by then."""
    for name in names:
        yield Finished(sequence=name, time=2.0, reason=reason, num_output_tokens=9)


def padded_step(k: int, **accepted: int) -> Iterator[Event]:
    """A decode step of a padded drafter batch: how many of K drafts of each sequence were accepted."""
    for name, number in accepted.items():
        yield Verified(sequence=name, time=1.0, drafts=(7,) * k, accepted=number, emitted=number + 1)
    rows = len(accepted) * (k + 1)
    yield Stepped(
        kind="decode",
        time=1.0,
        seconds=0.1,
        num_sequences=len(accepted),
        num_spec_tokens=k,
        target_rows=rows,
        first_pass_rows=rows,
        first_pass_kept=sum(accepted.values()) + len(accepted),
        loop_rows=len(accepted) * k,
    )


def decode_steps(*lengths: int) -> Iterator[Event]:
    """A decode step of one sequence for each draft length."""
    for k in lengths:
        yield Stepped(
            kind="decode",
            time=1.0,
            seconds=0.1,
            num_sequences=1,
            num_spec_tokens=k,
            target_rows=k + 1,
            first_pass_rows=k + 1,
            first_pass_kept=1,
            loop_rows=max(k - 1, 0),
        )


def mixture_steps(num_sequences: int, k: int, *touched: tuple[float, float]) -> Iterator[Event]:
    """Decode steps of a mixture with 8 experts of 10 MB, for each what it touched and what a plain step would."""
    for experts, plain in touched:
        yield Stepped(
            kind="decode",
            time=1.0,
            seconds=0.1,
            num_sequences=num_sequences,
            num_spec_tokens=k,
            target_rows=num_sequences * (k + 1),
            first_pass_rows=0,
            first_pass_kept=0,
            loop_rows=0,
            experts=Touched(experts=experts, plain=plain, num_experts=8, num_bytes=int(experts * 10**7)),
        )


def refusal(name: str, *, time: float = 0.0) -> Iterator[Event]:
    """A request that ends before it begins."""
    yield Submitted(sequence=name, time=time, num_prompt_tokens=5)
    yield Finished(sequence=name, time=time, reason="error", num_output_tokens=0)


def recorded(sessions: Mapping[str, Iterable[Event]]) -> tuple[list[RequestRow], list[Pass]]:
    """The tables of several sessions, by name; failed requests are in neither."""
    requests, passes = list[RequestRow](), list[Pass]()
    for name, events in sessions.items():
        recorder = Recorder(name)
        for event in events:
            for row in recorder.take(event):
                if not isinstance(row, RequestRow):
                    passes.append(row)
                elif row.reason != "error":
                    requests.append(row)
    return requests, passes


def write_session(path: Path, events: Iterable[Event], *, text: str = "text") -> None:
    """Let a process record ``events`` in the run directory ``path``."""
    with RunDirectory(path) as files:
        asked: dict[str, Submitted] = {}
        for event in events:
            files.see(event)
            if isinstance(event, Submitted):
                asked[event.sequence] = event
            elif isinstance(event, Finished) and event.reason != "error":
                request = asked[event.sequence]
                row = {"id": event.sequence, "prompt": "", "text": text}
                row |= {"token_ids": [1] * event.num_output_tokens, "finish_reason": event.reason}
                row |= {"turn": request.turn, "num_prompt_tokens": request.num_prompt_tokens}
                files.add_completion(row | {"category": request.category})
