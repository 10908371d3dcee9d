"""What the host does for a token, counted in calls of Python's functions: a clock would depend on the machine."""

import sys
from pathlib import Path
from types import FrameType

import pytest

import specgen
from specgen.config import SamplingParams
from tests.engines import Pair, engine_of, random_requests

_PACKAGE = Path(specgen.__file__).parent
_OF_THE_HOST = tuple(str(_PACKAGE / name) for name in ("core", "kv/pages.py", "record", "engine"))
_LENGTH = 60


def num_calls(pair: Pair, num_sequences: int, num_spec_tokens: int) -> int:
    """Calls within a run of so many sequences, all at once; a generator's are as many as it has items."""
    engine = engine_of(pair, num_spec_tokens=num_spec_tokens, max_batch_size=num_sequences, page_size=16)
    sampling, vocab_size = (
        SamplingParams(max_tokens=_LENGTH, ignore_eos=True),
        pair.models.target.config.vocab_size,
    )
    requests, found = random_requests(num_sequences, vocab_size, sampling), 0

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(_OF_THE_HOST)

    sys.setprofile(see)
    try:
        outputs = list(engine.generate(requests))
    finally:
        sys.setprofile(None)
    assert len(outputs) == num_sequences
    return found


@pytest.mark.parametrize("num_spec_tokens", [0, 3])
def test_a_token_costs_few_calls(random_pair: Pair, num_spec_tokens: int) -> None:
    few, many = 4, 20
    more = num_calls(random_pair, many, num_spec_tokens) - num_calls(random_pair, few, num_spec_tokens)
    # of each step: a sequence takes tokens, is asked whether it will end, and ``spec_length`` sees its drafts
    # and one of each sequence when it is admitted, by its tokens
    assert more / (_LENGTH * (many - few)) < 7
