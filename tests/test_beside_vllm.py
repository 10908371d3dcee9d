"""The script that measures specgen beside vLLM gives both the same prompts and counts wrong tokens; vLLM is a fake."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import beside_vllm
import pytest

from specgen import Engine

pytestmark = [pytest.mark.scripts, pytest.mark.slow]
ASKED = (
    "--num-spec-tokens 2 --cells 1,2,2x9 --max-new-tokens 6 --repeats 2 --kv-memory 0.1 --method draft_model"
)


def rows(engine: str, pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["beside_vllm.py", engine, str(pair), *ASKED.split()])
    beside_vllm.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


class FakeLlm:
    """Writes the text, but for its first token of all where it is to be ``wrong``."""

    asked: list[list[int]]
    given: dict[str, Any]
    wrong: bool

    def __init__(self, model: str, **given: Any) -> None:
        cycle = json.loads((Path(model).parent / "cycle.json").read_text())["tokens"]
        self._next = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
        FakeLlm.given, self._drafts = given, 0

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, use_tqdm: bool) -> list[Any]:
        found = []
        for each, asked in zip(prompts, sampling, strict=True):
            self.asked.append(each["prompt_token_ids"])
            token, out = each["prompt_token_ids"][-1], []
            for _ in range(asked.max_tokens):
                out.append(token := self._next[token])
            self._drafts += 4
            found.append(
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=[-1, *out[1:]] if self.wrong else out)])
            )
        return found

    def get_metrics(self) -> list[Any]:
        drafts, accepted = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
        return [
            SimpleNamespace(name=drafts, value=self._drafts),
            SimpleNamespace(name=accepted, value=self._drafts // 2),
        ]


@pytest.fixture(params=[False, True])
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[FakeLlm]:
    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeLlm, SimpleNamespace
    FakeLlm.asked, FakeLlm.wrong = [], request.param
    monkeypatch.setitem(sys.modules, "vllm", module)
    return FakeLlm


def test_both_have_the_same_prompts_and_what_is_wrong_is_counted(
    tiny_pair: Path, vllm: type[FakeLlm], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[list[int]] = []
    generate = Engine.generate

    def recorded(self: Engine, prompts: Any, *others: Any) -> Any:
        asked.extend(list(prompt.token_ids) for prompt in prompts)
        return generate(self, prompts, *others)

    monkeypatch.setattr(Engine, "generate", recorded)
    ours, theirs = (rows(engine, tiny_pair, monkeypatch, capsys) for engine in ("specgen", "vllm"))
    assert asked == vllm.asked
    assert [(row["batch"], row["prompt_tokens"], row["prompts"]) for row in ours] == [
        (1, "drawn", 3),
        (2, "drawn", 4),
        (2, 9, 4),
    ]
    assert [row["handed_over_at_once"] for row in ours] == [1, 4, 4]
    same = ("batch", "prompt_tokens", "prompts", "handed_over_at_once", "output_tokens")
    assert [[row[name] for name in same] for row in ours] == [[row[name] for name in same] for row in theirs]
    assert [row["output_tokens"] for row in ours] == [18, 24, 24]
    assert {row["wrong_tokens"] for row in ours} == {0}
    # a wrong token is one, and so is the right one behind it, which does not follow it
    assert [row["wrong_tokens"] for row in theirs] == [4 * row["prompts"] * vllm.wrong for row in theirs]
    assert all(1 < row["mean_acceptance_length"] < 3 for row in ours)
    assert {row["mean_acceptance_length"] for row in theirs} == {1.5}
    assert vllm.given["speculative_config"] == {
        "method": "draft_model",
        "model": str(tiny_pair / "drafter"),
        "num_speculative_tokens": 2,
    }
