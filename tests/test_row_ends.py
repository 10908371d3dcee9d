"""Where a row says that its text ends, at the earliest and by which tokens, and what its prompt's tokens were worth."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.config import MAX_LOGPROBS, EngineConfig, SamplingParams
from specgen.config.bundled import data_directory
from specgen.core.sequence import Completion, Request
from specgen.decoding.sampling import SamplingBatch, SamplingForm, biased, decisive_logits
from specgen.engine.build import most_demanding
from specgen.engine.engine import Engine
from specgen.prompts import Prompt
from specgen.text.tokenizer import StopStrings, Tokenizer, load_tokenizer
from tests.commands import printed, refused, rows, specgen, write_rows
from tests.engines import Pair, bundled_requests, engine_of, generate, nan_at, random_requests
from tests.marks import mostly_slow
from tests.reference_heads import ReferenceHead
from tests.test_generation_config import models, saying

CPU = torch.device("cpu")
DEMO = data_directory() / "demo"


# --- exact with speculation ------------------------------------------------------------------------


@pytest.mark.parametrize("draft_sampling", mostly_slow(["greedy", "probabilistic"], "probabilistic"))
def test_sampled_text_has_no_end_before_it_may_have(random_pair: Pair, draft_sampling: str) -> None:
    every = tuple(range(3, 60))
    sampling = SamplingParams(
        max_tokens=14, min_tokens=8, temperature=1.2, stop_token_ids=every, logit_bias=((5, 3.0),)
    )
    outputs = generate(random_pair, random_requests(8, 128, sampling), draft_sampling=draft_sampling)
    assert all(each.finish_reason == "stop" for each in outputs.completions.values())
    for text in outputs.texts.values():
        assert len(text) > 8
        ends = {*every, *random_pair.models.target.config.eos_token_ids}
        assert text[-1] in ends
        assert not set(text[:8]) & ends


def test_with_ignore_eos_its_own_tokens_alone_end_a_text(demo_pair: Pair) -> None:
    """And before ``min_tokens`` the model's are not chosen either, as in vLLM."""
    (request,) = bundled_requests(1, SamplingParams(max_tokens=120))
    (eos,) = demo_pair.models.target.config.eos_token_ids
    text = generate(demo_pair, [request]).texts[request.id]
    assert text[-1] == eos

    def asking(**sampling: Any) -> tuple[int, ...]:
        asked = SamplingParams(max_tokens=len(text) + 3, ignore_eos=True, **sampling)
        return generate(demo_pair, [replace(request, sampling=asked)]).texts[request.id]

    assert asking()[: len(text)] == text
    assert len(asking()) == len(text) + 3
    assert asking(stop_token_ids=(eos,)) == text
    held_back = asking(min_tokens=len(text) + 3)
    assert held_back[: len(text) - 1] == text[:-1]
    assert eos not in held_back


# --- what is paid ----------------------------------------------------------------------------------


def test_unused_they_cost_nothing() -> None:
    plain = SamplingForm("greedy", 0, None)
    params = [SamplingParams(stop_token_ids=(3, 4), prompt_logprobs=2), SamplingParams(stop_token_ids=(5,))]
    assert SamplingForm.of(params, (2,)) == plain
    assert SamplingForm.of([*params, SamplingParams(min_tokens=1)], (2,)).num_biases == 16
    assert most_demanding([SamplingParams(min_tokens=5)]).logit_bias
    assert most_demanding([*params, SamplingParams()]) == replace(SamplingParams(), prompt_logprobs=2)


def test_each_row_of_a_verify_pass_has_its_own_position() -> None:
    params = [
        SamplingParams(min_tokens=3, stop_token_ids=(4,), logit_bias=((1, 2.0),)),
        SamplingParams(suppress_tokens=(0,)),
    ]
    batch = SamplingBatch.of(params, [0, 0], CPU, end_tokens=(2,), num_prompt=[10, 5])
    logits = torch.zeros(2, 4, 6)
    found = biased(logits, torch.tensor([10, 5]), batch)  # each has one token of output
    inf = float("inf")
    held = [0, 2, -inf, 0, -inf, 0]
    assert found[0].tolist() == [held, held, [0, 2, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0]]
    assert found[1].tolist() == [[-inf, 0, 0, 0, 0, 0]] * 4
    for output, row in ((3, 3), held), ((3, 3, 3), [0, 2, 0, 0, 0, 0]):  # what decides a divergence
        assert decisive_logits(logits[0, 0], (3, 5), output, params[0], (2,)).tolist() == row


# --- stop strings ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(data_directory() / "demo" / "target"))


@pytest.mark.parametrize("stop", ["s", " bag", "ags", "bags b", "buys"])
def test_a_stop_string_that_is_complete_by_then_ends_nothing(tokenizer: Tokenizer, stop: str) -> None:
    """Compared with vLLM's rule: the string has to end behind the text of the first ``min_tokens`` tokens."""
    ids = tokenizer.encode_text("Tom has 3 bags and buys 4 bags but gives 2 bags back")
    whole = tokenizer.decode(ids)
    found = set()
    for least in range(len(ids) + 1):
        done = len(tokenizer.decode(ids[:least]))
        at = whole.find(stop, max(done + 1 - len(stop), 0))
        kept = next(
            (n for n in range(len(ids) + 1) if len(tokenizer.decode(ids[:n])) >= at + len(stop)), None
        )
        expected = kept if at >= 0 else None
        for size in (1, 3, len(ids)):
            finder, count = StopStrings(tokenizer, [stop], min_tokens=least), None
            for begin in range(0, len(ids), size):
                if (part := finder.feed(ids[begin : begin + size])) is not None:
                    count = begin + part
                    break
            assert count == expected, (least, size)
        text = StopStrings(tokenizer, [stop]).text(ids[:expected], least)
        assert text == (whole[:at] if at >= 0 else whole)
        found.add(expected)
    assert len(found) >= 3 or stop in ("bags b", "buys")


def test_a_text_and_what_ended_it(tokenizer: Tokenizer) -> None:
    """The token that ended a text is in ``token_ids`` and not in ``text``; a stop string may come again."""
    engine = Engine(
        EngineConfig(model=str(DEMO / "target"), drafter=None, num_spec_tokens=0, device="cpu", page_size=4)
    )
    prompt = Prompt(id="a", text="Tom has 3 bags and")

    def output(**sampling: Any) -> Any:
        (found,) = engine.generate(prompt, SamplingParams(max_tokens=24, **sampling))
        return found

    free = output()
    fourth = free.token_ids[3]
    assert fourth not in free.token_ids[:3]
    ended = output(stop_token_ids=(fourth,))
    assert ended.token_ids == free.token_ids[:4]
    assert ended.text == tokenizer.decode(free.token_ids[:3])
    assert ended.finish_reason == "stop"
    piece = tokenizer.decode(free.token_ids[:3]).strip()[-1]
    assert output(stop=piece).text == free.text[: free.text.index(piece)]
    later = output(stop=piece, min_tokens=8)
    assert len(later.token_ids) > 8
    assert later.text.startswith(tokenizer.decode(free.token_ids[:8]))


# --- log-probabilities of a prompt -----------------------------------------------------------------


def check(reference: ReferenceHead, completion: Completion) -> None:
    """``prompt_logprobs`` by one pass of ``transformers``."""
    request, found = completion.request, completion.prompt_logprobs
    if (asked := request.sampling.prompt_logprobs) is None:
        assert found is None
        return
    assert found is not None
    assert found[0] is None
    prompt = request.prompt_token_ids
    with torch.inference_mode():
        logits = reference.target.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert len(found) == len(prompt)
    for token, each, row in zip(prompt[1:], found[1:], logits, strict=False):
        assert each is not None
        assert each.chosen == pytest.approx(float(row[token]), abs=1e-4)
        assert [value for _, value in each.top] == pytest.approx(row.topk(asked).values.tolist(), abs=1e-4)
        assert [float(row[top]) for top, _ in each.top] == pytest.approx(
            [value for _, value in each.top], abs=1e-4
        )


@pytest.mark.parametrize(
    ("k", "batch", "ahead", "rows_of_a_pass"),
    mostly_slow(
        [
            (0, "padded", False, 2048),
            (4, "padded", True, 2048),
            (4, "non-padded", False, 7),
            (4, "padded", True, 7),
        ],
        (4, "non-padded", False, 7),
    ),
)
def test_prompt_logprobs_equal_transformers(
    demo_pair: Pair,
    demo_reference: ReferenceHead,
    device_like: Callable[..., None],
    k: int,
    batch: str,
    ahead: bool,
    rows_of_a_pass: int,
) -> None:
    """Also of prompts that the prefix cache has, which then are computed in full."""
    device_like(ahead)
    asked = [
        replace(
            r,
            sampling=SamplingParams(max_tokens=1 + 3 * i, prompt_logprobs=(None, 0, 5, MAX_LOGPROBS)[i % 4]),
        )
        for i, r in enumerate(bundled_requests(6, SamplingParams()))
    ]
    again = [replace(request, id=f"{request.id} again") for request in asked]
    outputs = generate(
        demo_pair,
        [*asked, *again],
        num_spec_tokens=k,
        drafter_batch=batch,
        max_batch_size=3,
        max_prefill_tokens=rows_of_a_pass,
    )
    for completion in outputs.completions.values():
        check(demo_reference, completion)
        cached = completion.record.num_cached_tokens
        assert not cached or completion.request.sampling.prompt_logprobs is None
    assert outputs.any_cached
    plain = generate(
        demo_pair, [replace(r, sampling=replace(r.sampling, prompt_logprobs=None)) for r in asked]
    )
    assert {name: outputs.texts[name] for name in plain.texts} == plain.texts


def test_a_prompt_of_one_token_has_none(random_pair: Pair) -> None:
    request = Request(id="a", prompt_token_ids=(5,), sampling=SamplingParams(max_tokens=2, prompt_logprobs=1))
    assert generate(random_pair, [request]).completions["a"].prompt_logprobs == (None,)


def test_a_row_of_a_prompt_that_is_not_a_number_is_an_error(random_pair: Pair) -> None:
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=0)
    # a masked row of attention takes in all of its chunk
    spoilt, whole = (
        Request(id=name, prompt_token_ids=ids, sampling=sampling)
        for name, ids in (("spoilt", (5, 7, 9, 11)), ("whole", (5, 6)))
    )
    found = generate(nan_at(random_pair, 7), [spoilt, whole], max_prefill_tokens=3).completions
    assert "not finite (NaN) at prompt token 1, and again when tried alone" in (found["spoilt"].error or "")
    assert found["whole"].error is None


# --- rows, commands, Python ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_its_resume_and_its_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    own = {"min_tokens": 9, "prompt_logprobs": 1, "max_tokens": 200}
    write_rows(
        tmp_path / "rows.jsonl",
        [{"id": "a", "prompt": "Tom has 3 bags", **own}, {"id": "b", "prompt": "Tom has"}],
    )
    out = tmp_path / "run"
    ends = tokenizer.encode_text("Tom has 3 bags, and 4, and. So")
    command = [
        *("generate", *models(DEMO / "target"), "--dataset", tmp_path / "rows.jsonl", "--output", out),
        *("--min-tokens", 4, "--stop-token-ids", ",".join(map(str, ends)), "--format", "parquet"),
    ]
    printed(*command)
    found = {row["id"]: row for row in rows(out / "completions.jsonl")}
    assert not set(found["a"]["token_ids"][:9]) & set(ends)
    assert not set(found["b"]["token_ids"][:4]) & set(ends)
    assert found["a"]["prompt_token_ids"] == tokenizer.encode_text("Tom has 3 bags")
    first, *others = found["a"]["prompt_logprobs"]
    assert first is None
    assert all(each["chosen"] <= 0 and len(each["top"]) == 1 for each in others)
    assert "prompt_logprobs" not in found["b"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["sampling"]["min_tokens"] == 4
    assert f"stop token ids ({len(ends)}), at least 4, at most" in manifest["settings"]["sampling"]
    printed("generate", "--config", out / "config.yaml", "--output", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "manifest.json").read_text())["sampling"] == manifest["sampling"]
    other = specgen(*command, "--min-tokens", 3)
    assert "--min-tokens 4 -> 3" in str(other.exception)
    from datasets import load_dataset

    table = load_dataset(
        "parquet",
        data_files=str(out / "completions.parquet"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert table[0]["prompt_logprobs"][1]["chosen"] == others[0]["chosen"]
    assert table[0]["prompt_logprobs"][0] is None


def test_a_batch_row_gets_them_in_the_form_of_its_endpoint(tmp_path: Path) -> None:
    chat, text = (
        {"custom_id": name, "method": "POST", "url": f"/v1/{url}", "body": {"max_tokens": 1, **body}}
        for name, url, body in (
            (
                "chat",
                "chat/completions",
                {"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 1},
            ),
            ("text", "completions", {"prompt": [5, 9], "prompt_logprobs": 2, "min_tokens": 1}),
        )
    )
    write_rows(tmp_path / "rows.jsonl", [chat, text])
    out = tmp_path / "run"
    command = ("generate", *models(DEMO / "target"), "--dataset", tmp_path / "rows.jsonl", "--output", out)
    printed(*command, "--format", "openai")
    bodies = {row["custom_id"]: row["response"]["body"] for row in rows(out / "batch_output.jsonl")}
    assert bodies["chat"]["prompt_logprobs"][0] is None
    first, second = bodies["text"]["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second.keys() >= {"9"}
    assert second["9"].keys() == {"logprob", "rank", "decoded_token"}
    assert sorted(each["rank"] for each in second.values() if each["rank"]) == [1, 2]
    assert "prompt_logprobs" not in bodies["chat"]["choices"][0]


@pytest.mark.slow
def test_min_new_tokens_of_a_checkpoint_is_that_of_transformers(tmp_path: Path) -> None:
    """Tokens that its texts have early are made its end tokens, so that some are held back."""
    import transformers

    plain = Engine(EngineConfig(model=str(DEMO / "target"), drafter=None, num_spec_tokens=0, device="cpu"))
    prompts = [f"Tom has {n} bags and" for n in range(4)]
    free = list(plain.generate(prompts, SamplingParams(max_tokens=20)))
    ends = sorted({2, *(output.token_ids[at] for output in free for at in (3, 9))})
    target = saying(tmp_path / "target", {"eos_token_id": ends, "min_new_tokens": 7})
    write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt} for prompt in prompts])
    result = specgen(
        *("generate", *models(target), "--dataset", tmp_path / "rows.jsonl", "--max-new-tokens", 20),
        *("--output", tmp_path / "run"),
    )
    assert "holds: min_new_tokens 7" in result.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer, lengths = plain.tokenizer, set()
    for row in rows(tmp_path / "run" / "completions.jsonl"):
        ids = torch.tensor([tokenizer.encode_text(row["prompt"])])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert row["token_ids"] == text[0, ids.shape[1] :].tolist()
        lengths.add(len(row["token_ids"]))
    assert min(lengths) < 20
    assert min(lengths) > 7
    with refused(r"generation_config.json: min-tokens is 7: .*, or --generation-config none"):
        raise specgen("generate", *models(target), "--max-new-tokens", 4).exception or AssertionError


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": 9, "max_tokens": 4}, "min-tokens is 9: use 0 to max_tokens (--max-new-tokens), 4"),
    ({"min_tokens": 200}, "min-tokens is 200: use 0 to max_tokens (--max-new-tokens), 20"),
    ({"min_tokens": -1}, "min-tokens is -1"),
    ({"min_tokens": "3"}, "min_tokens is '3': use a whole number"),
    ({"stop_token_ids": 5}, "stop_token_ids is not a list"),
    ({"stop_token_ids": [5000]}, "stop-token-ids names 5000, which is not in the vocabulary of 3072"),
    (
        {"stop_token_ids": [*range(1024)], "min_tokens": 1, "logit_bias": {"7": 1}},
        "what min-tokens holds back are 1025 tokens: use at most 1024",
    ),
    ({"prompt_logprobs": 21}, "prompt_logprobs is 21: use 0"),
    ({"prompt_logprobs": True}, "prompt_logprobs is True: use a whole number"),
]


def test_wrong_rows_are_errors_of_their_own_beside_one_that_asks_for_much(tmp_path: Path) -> None:
    much = {"id": "much", "prompt": "Tom", "min_tokens": 22, "max_tokens": 23}
    much["stop_token_ids"] = [*range(500)]
    wrong = [{"id": f"{n}", "prompt": "Tom", **row} for n, (row, _) in enumerate(WRONG)]
    write_rows(tmp_path / "rows.jsonl", [*wrong, much])
    out = tmp_path / "run"
    command = ("generate", *models(DEMO / "target"), "--dataset", tmp_path / "rows.jsonl", "--output", out)
    specgen(*command, "--max-new-tokens", 20)
    (row,) = rows(out / "completions.jsonl")
    assert (row["id"], len(row["token_ids"])) == ("much", 23), "more than the default"
    errors = {each["id"]: each["error"] for each in rows(out / "errors.jsonl")}
    assert len(errors) == len(WRONG)
    for number, (_, reason) in enumerate(WRONG):
        assert reason in errors[f"{number}"]


def test_an_option_that_is_no_list_of_ids() -> None:
    wrong = specgen("generate", "--stop-token-ids", "a,5")
    assert "stop-token-ids is 'a,5': write token ids such as 13,198" in str(wrong.exception)


def test_an_engine_keeps_less_of_prompts_that_ask(random_pair: Pair) -> None:
    """What one request computed in full another may use."""
    engine = engine_of(random_pair)
    prompt = tuple(range(5, 25))
    asking, plain = (
        Request(
            id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=2, prompt_logprobs=asked)
        )
        for name, asked in (("asking", 0), ("plain", None))
    )
    cached = [each.record.num_cached_tokens for r in (asking, plain, asking) for each in engine.generate([r])]
    assert cached == [0, 16, 0]
