"""What the engine tells of its work while it runs; ``record.recorder`` makes rows of it.

Times are seconds on a monotonic clock since the engine was warm; ``sequence`` is the request's id.
"""

from dataclasses import dataclass


def turn_id(conversation: str, turn: int) -> str:
    """The id of the request for a turn of the conversation with this id; its first turn, 1, has the id itself."""
    return conversation if turn == 1 else f"{conversation}/turn-{turn}"


def conversation_of(sequence: str, turn: int) -> str:
    """The id of the conversation whose ``turn`` the request ``sequence`` asks; the inverse of ``turn_id``."""
    return sequence if turn == 1 else sequence.removesuffix(f"/turn-{turn}")


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A request entered the queue."""

    sequence: str
    time: float
    num_prompt_tokens: int
    category: str | None = None
    turn: int = 1  # 1 for the first user turn
    num_turns: int = 1  # of its conversation; earlier versions did not say


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """A prompt was prefilled, ``num_cached`` tokens of which came from the prefix cache.

    ``emitted`` is 1 with its first token, 0 after a preemption.
    """

    sequence: str
    time: float
    emitted: int
    num_cached: int


@dataclass(frozen=True, kw_only=True)
class Verified:
    """One verify step of one sequence: its drafts, how many the target accepted, how many tokens were emitted.

    ``emitted`` is ``accepted + 1`` unless the text ended within the step. Plain decoding has no drafts.
    """

    sequence: str
    time: float
    drafts: tuple[int, ...]
    accepted: int
    emitted: int


@dataclass(frozen=True, kw_only=True)
class Switched:
    """A text changed its part: output tokens from number ``at`` on, counted from 0, are ``reasoning`` or ``answer``.

    Comes before the step whose first token that is, at the latest. A text without it is an answer throughout.
    """

    sequence: str
    time: float
    part: str
    at: int


@dataclass(frozen=True, kw_only=True)
class Preempted:
    """A sequence freed its pages and will be prefilled again."""

    sequence: str
    time: float


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A sequence ended: ``reason`` is ``stop``, ``length``, ``context`` (a full one) or ``error``.

    A refused one has ``num_output_tokens`` 0.
    """

    sequence: str
    time: float
    reason: str
    num_output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Touched:
    """The experts of a layer (means over layers) that the rows of a step's sequences chose; no padding rows.

    ``plain`` counts the rows of the newest tokens alone, which are those of a plain step in the place of this one.
    """

    experts: float
    plain: float
    num_experts: int  # that a layer has
    num_bytes: int  # of those touched, in all layers


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """One step of the engine and the rows it computed.

    ``num_spec_tokens`` is K, the drafts per sequence (0 in a prefill). ``first_pass_rows`` are the rows of the drafter
    KV fill and ``first_pass_kept`` those of accepted tokens (the rest is padding of a padded drafter batch);
    ``loop_rows`` are the rows of the drafting passes. ``experts`` are those that a decode step of a mixture touched.

    ``seconds`` are the device's, from the beginning of the pass to its end, without captures of CUDA graphs. Before
    that it had nothing to do for ``idle`` seconds; in at most ``idle_outside`` of them its caller, who prepares
    prompts and writes texts, had the host. ``num_waiting`` prompts had not begun.
    """

    kind: str  # "prefill" or "decode"
    time: float  # at the end of the step
    seconds: float
    num_sequences: int
    num_spec_tokens: int
    target_rows: int
    first_pass_rows: int
    first_pass_kept: int
    loop_rows: int
    experts: Touched | None = None
    idle: float = 0.0
    idle_outside: float = 0.0
    num_waiting: int = 0


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A CUDA graph for steps of ``num_sequences`` was captured, or not for lack of memory (not ``fits``)."""

    time: float
    what: str  # "step", or the name of a pass
    num_sequences: int
    seconds: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """The device had no memory for a pass; the run continues with these limits."""

    time: float
    max_batch_size: int
    max_prefill_tokens: int


Event = Submitted | Prefilled | Verified | Switched | Preempted | Finished | Stepped | Captured | OutOfMemory
