"""N-gram drafts: each equals a naive search, texts are the target's, and reports count the drafts that there were."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import DraftLength, EngineConfig, SamplingParams, UserError, lookup_of
from specgen.config.bundled import data_directory, pair
from specgen.core.sequence import Request
from specgen.core.spec_length import BestPlan, StepCosts, StepPlan
from specgen.decoding import ngram
from specgen.decoding.ngram import lookup
from specgen.decoding.outcome import NO_DRAFT
from specgen.decoding.verify import accept_drawn, accept_greedy
from specgen.engine.build import page_budget
from specgen.jobs.ray_engine import _portable
from specgen.jobs.run import run
from specgen.record.record_rows import EngineRow, PassRow
from specgen.report.tables import of_run
from specgen.report.terminal import render
from tests.engines import Outputs, Pair, config_of, engine_of, generate, nan_at
from tests.jobs import Silent, conversations
from tests.marks import mostly_slow
from tests.test_faults import ERRORS, Setting, require_no_change, run_without_fault

GREEDY = SamplingParams(max_tokens=30)
END = 2  # of the texts of these models


def naive(text: Sequence[int], longest: int, k: int) -> tuple[int, ...]:
    """Drafts behind ``text``, token by token: each as if the ones before it had become text."""
    text = list(text)
    for length in range(min(longest, len(text) - 1), 0, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                source = start + length
                for i in range(k):
                    text.append(text[source + i])
                return tuple(text[-k:])
    return ()


def copying(count: int, sampling: SamplingParams = GREEDY, num_ids: int = 5) -> list[Request]:
    """Prompts that repeat themselves: random, of few different tokens, and some with the start of another."""
    generator = torch.Generator().manual_seed(count)
    requests: list[Request] = []
    for index in range(count):
        length = int(torch.randint(1, 30, (1,), generator=generator))
        ids = tuple(torch.randint(3, 3 + num_ids, (length,), generator=generator).tolist())
        start = requests[index // 2].prompt_token_ids[:13] if index % 3 else ()
        requests.append(Request(id=f"r{index}", prompt_token_ids=start + ids, sampling=sampling))
    return requests


def checked(outputs: Outputs, longest: int, k: int | None = None, end: int = END) -> dict[int, int]:
    """How many steps had so many drafts, after each is compared with the naive search up to the ``end`` token."""
    seen: dict[int, int] = {}
    for name, steps in outputs.verified.items():
        completion = outputs.completions[name]
        assert completion.error is None
        tokens = list(completion.request.prompt_token_ids + completion.token_ids[:1])
        written = 1
        for drafts, _, emitted in steps:
            expected = naive(tokens[1:], longest, k or len(drafts))
            assert drafts == expected[: expected.index(end) + 1 if end in expected else None], name
            seen[len(drafts)] = seen.get(len(drafts), 0) + 1
            tokens += completion.token_ids[written : written + emitted]
            written += emitted
    return seen


# --- the search -----------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [1, 2, 3, 5])
@pytest.mark.parametrize("num_ids", [2, 4, 20])
def test_a_search_equals_the_naive_one(longest: int, num_ids: int) -> None:
    """Whatever lies behind the end of a text; a text without a match has no draft."""
    generator = torch.Generator().manual_seed(longest)
    texts = torch.randint(0, num_ids, (60, 40), generator=generator, dtype=torch.int32)
    lengths = torch.randint(1, 41, (60,), generator=generator)
    for k in range(1, 9):
        found = lookup(texts, lengths, longest, k)[0].tolist()
        for row, text, length in zip(found, texts.tolist(), lengths.tolist(), strict=True):
            assert row == (list(naive(text[:length], longest, k)) or [NO_DRAFT] * k), text[:length]


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([5], []),
        ([5, 6, 7], []),
        ([5, 5], [5, 5, 5, 5]),  # it repeats itself, and so do the drafts
        ([5, 6, 7, 6], [7, 6, 7, 6]),
        ([1, 2, 3, 8, 9, 1, 2, 3, 7, 7, 1, 2, 3], [7, 7, 1, 2]),  # the later of two
        ([4, 1, 2, 3, 8, 9, 6, 2, 3, 7, 7, 5, 1, 2, 3], [8, 9, 6, 2]),  # the longer of two
        ([0, 1, 2, 3, 8, 9, 6, 1, 2, 3, 7, 7, 0, 1, 2, 3], [7, 7, 0, 1]),  # N tokens are enough
    ],
)
def test_what_is_proposed(text: list[int], drafts: list[int]) -> None:
    found = lookup(torch.tensor([text], dtype=torch.int32), torch.tensor([len(text)]), 3, 4)[0][0].tolist()
    assert found == (drafts or [NO_DRAFT] * 4)


# --- in an engine ---------------------------------------------------------------------------------


SETTINGS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (3, 4, {}),
    (1, 1, {"page_size": 1, "max_batch_size": 1}),
    (2, 8, {"page_size": 16, "max_prefill_tokens": 5}),
    (5, 2, {"prefix_cache": False, "max_batch_size": 32}),
    (3, 3, {"attention": "sdpa-static"}),
    (4, 5, {"kv_memory": 300_000, "drafter_batch": "non-padded"}),  # preempts
)


@pytest.mark.parametrize(
    ("longest", "k", "changes", "ahead"),
    mostly_slow([(*each, number % 2 == 0) for number, each in enumerate(SETTINGS)], (*SETTINGS[0], True)),
)
def test_drafts_equal_the_naive_search(
    random_pair: Pair,
    device_like: Callable[..., None],
    longest: int,
    k: int,
    changes: dict[str, Any],
    ahead: bool,
) -> None:
    requests = copying(24)
    plain = generate(random_pair, requests, num_spec_tokens=0)
    device_like(ahead)
    settings = {"drafter": f"ngram:{longest}", "num_spec_tokens": k} | changes
    outputs = generate(random_pair, requests, **settings)
    assert outputs.texts == plain.texts
    seen = checked(outputs, longest, k)
    assert set(seen) == {0, k}
    assert min(seen.values()) > 5
    assert set(outputs.accepted) >= {0, 1}
    assert (outputs.num_preempted > 0) == ("kv_memory" in changes)


@pytest.mark.parametrize("k", mostly_slow([4, "auto"], 4))
def test_nothing_is_drafted_behind_the_end_of_a_text(random_pair: Pair, k: int | str) -> None:
    """As between the messages of a chat; the end itself is drafted, and its text may end so."""
    requests = [
        replace(each, prompt_token_ids=tuple(END if token == 3 else token for token in each.prompt_token_ids))
        for each in copying(24)
    ]
    plain = generate(random_pair, requests, num_spec_tokens=0)
    outputs = generate(random_pair, requests, drafter="ngram", num_spec_tokens=k)
    assert outputs.texts == plain.texts
    steps = [step for steps in outputs.verified.values() for step in steps]
    assert all(END not in drafts[:-1] for drafts, *_ in steps)
    if k == 4:  # ``auto`` drafts what pays on this machine now
        assert any(END in drafts for drafts, *_ in steps)
        assert set(checked(outputs, 3, 4)) > {0, 4}


@pytest.mark.slow
def test_rows_are_searched_in_parts(random_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with long tables, where a whole batch at once would take too much memory."""
    whole = generate(random_pair, copying(12), drafter="ngram")
    sizes = set()

    def counted(texts: Tensor, *asked: Any) -> tuple[Tensor, Tensor]:
        sizes.add(len(texts))
        return lookup(texts, *asked)

    monkeypatch.setattr(ngram, "lookup", counted)
    for positions, most in ((1, 1), (900, 3)):
        sizes.clear()
        monkeypatch.setattr(ngram, "_AT_ONCE", positions)
        assert generate(random_pair, copying(12), drafter="ngram").verified == whole.verified
        assert max(sizes) == most


def test_a_seed_gives_the_same_text_in_any_batch(random_pair: Pair) -> None:
    requests = copying(9, SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=7, logprobs=2))
    alone = generate(random_pair, requests, max_batch_size=1, drafter="ngram")
    assert alone.texts == generate(random_pair, requests, num_spec_tokens=0).texts
    together = generate(random_pair, requests[::-1], max_batch_size=8, drafter="ngram")
    assert alone.texts == together.texts
    assert alone.verified == together.verified
    assert {len(step[0]) for steps in alone.verified.values() for step in steps} == {0, 3}
    for name, completion in alone.completions.items():
        assert completion.logprobs is not None
        assert [each.chosen for each in completion.logprobs] == pytest.approx(
            [each.chosen for each in together.completions[name].logprobs or ()], abs=1e-4
        )


@pytest.mark.slow
def test_nan_logits_fail_only_their_request(random_pair: Pair) -> None:
    """The rows of missing drafts hold a token that the sequence has, so they bring in no NaN of another."""
    requests = copying(9)
    right = generate(random_pair, requests, drafter="ngram")
    requests = [r for r in requests if 0 not in right.texts[r.id]]  # what a row without a draft might hold
    right = generate(random_pair, requests, drafter="ngram")
    assert len(requests) > 3
    assert {len(step[0]) for steps in right.verified.values() for step in steps} == {0, 3}
    outputs = generate(nan_at(random_pair, 0), requests, drafter="ngram")
    assert outputs.texts == right.texts
    bad = Request(id="bad", prompt_token_ids=(7, 0, 7), sampling=GREEDY)
    outputs = generate(nan_at(random_pair, 0), [bad, *requests], drafter="ngram")
    assert "not finite" in (outputs.completions["bad"].error or "")
    assert {name: outputs.texts[name] for name in right.texts} == right.texts


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("kind", "prefix_cache", "ahead", "drafter"),
    [
        ("greedy", True, True, "ngram"),
        ("greedy", False, False, "ngram"),
        ("sampled", True, False, "ngram"),
        ("greedy", True, False, "suffix"),  # whose drafts may be others, as some answers end later
    ],
)
def test_an_error_at_any_launch_of_a_search_changes_no_result(
    demo_pair: Pair,
    device_like: Callable[..., None],
    kind: str,
    prefix_cache: bool,
    ahead: bool,
    drafter: str,
    error: type[RuntimeError],
) -> None:
    device_like(ahead)
    learns = drafter == "suffix"
    settings = {"drafter": drafter} | ({"max_batch_size": 2} if learns else {})
    plan = StepPlan(num_drafts=4) if learns else None
    setting = Setting(demo_pair, kind, 4, prefix_cache, ahead, settings, plan)
    right = run_without_fault(setting)
    places = ("AnswerPool.refresh", "AnswerPool.lookup") if learns else ("NgramDrafter.observe", "lookup")
    module = "answer_pool." if learns else "ngram."
    assert {module + place for place in places} <= set(right.places)
    require_no_change(setting, right, error, module)


# --- missing drafts -------------------------------------------------------------------------------


def test_a_missing_draft_is_never_accepted() -> None:
    """Not where the target is sure of token 0 either, nor at any random number; the bonus token is the target's."""
    drafts = torch.tensor([[4, NO_DRAFT, NO_DRAFT], [NO_DRAFT] * 3, [4, 4, 4]])
    greedy = torch.tensor([[4, 0, 0, 0], [0, 0, 0, 0], [4, 4, 0, 0]])
    probs = torch.nn.functional.one_hot(greedy, 6).float()
    for u in (0.0, 0.5, 1 - 2**-24):
        for accepted, tokens in (
            accept_greedy(drafts, greedy),
            accept_drawn(drafts, probs, torch.full((3, 4), u)),
        ):
            assert accepted.tolist() == [1, 0, 2]
            assert tokens[:2, 0].tolist() == [4, 0]
            assert (tokens >= 0).all()
            assert (int(tokens[0, 1]), int(tokens[2, 2])) == (0, 0)


def test_rows_and_reports_count_the_drafts_that_there_were(random_pair: Pair) -> None:
    outputs = generate(random_pair, copying(24), drafter="ngram", num_spec_tokens=4)
    drafted = [step[0] for steps in outputs.verified.values() for step in steps]
    assert {len(drafts) for drafts in drafted} == {0, 4}
    assert min(min(drafts, default=0) for drafts in drafted) >= 0
    report = outputs.report(4)
    assert report.num_drafts == sum(map(bool, drafted)) < len(drafted)
    assert report.num_draft_tokens == sum(map(len, drafted))
    assert sum(step.num_drafting for step in outputs.steps) == report.num_drafts
    steps = [row for row in outputs.passes if isinstance(row, PassRow)]
    assert {(step.first_pass_rows, step.first_pass_kept, step.loop_rows) for step in steps} == {(0, 0, 0)}
    text = render(of_run(report, {}))
    assert "held rejected drafts" in text
    assert "drafter rows" not in text


@pytest.mark.slow
def test_auto_falls_to_no_drafts_where_nothing_is_found(
    random_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row without a draft costs as much as a rejected one, so it has to count as one there."""
    costs = StepCosts(seconds={(1, k): 1 + 0.1 * k for k in range(5)})

    def nothing(texts: Tensor, lengths: Tensor, longest: int, k: int) -> tuple[Tensor, Tensor]:
        return torch.full((len(texts), k), NO_DRAFT), torch.zeros(len(texts))

    monkeypatch.setattr(ngram, "lookup", nothing)
    events: list[EngineRow] = []
    engine = engine_of(random_pair, events.append, drafter="ngram")
    engine.spec_length = BestPlan(costs)
    requests = copying(40, SamplingParams(max_tokens=30, ignore_eos=True))
    assert len(list(engine.generate(requests))) == 40
    lengths = [e.num_spec_tokens for e in events if isinstance(e, PassRow) and e.kind == "decode"]
    assert lengths[0] > 0
    assert sum(k == 0 for k in lengths) > 0.8 * len(lengths)


# --- names, memory, runs --------------------------------------------------------------------------


def test_names() -> None:
    found = {
        name: each and (each.name, each.learns)
        for name in (
            *("ngram", "ngram:1", "ngram:16", "./ngram", "some/ngram", "suffix", "suffix:4", "./suffix"),
        )
        for each in [lookup_of(name)]
    }
    assert [*found.values()] == [
        *(("ngram:3", False), ("ngram:1", False), ("ngram:16", False), None, None),
        *(("suffix:8", True), ("suffix:4", True), None),
    ]
    assert lookup_of(None) is None
    for wrong in ("ngram:", "ngram:0", "ngram:17", "ngram:x", "ngram:-1", "ngram:³", "suffix:17"):
        kind = wrong.partition(":")[0]
        with pytest.raises(UserError, match=rf"write {kind}:N with .* 1 to 16, or \./{kind}"):
            EngineConfig(model="some", drafter=wrong)


def test_the_bundled_target_takes_ngrams() -> None:
    demo = data_directory() / "demo"
    assert pair(None, "ngram:2", DraftLength(most=4)) == (str(demo / "target"), "ngram:2")
    with pytest.raises(UserError, match="is given without a model"):
        pair(None, "./ngram", DraftLength(most=4))


def test_inspect_explains_ngrams(demo_path: Path) -> None:
    target, head = str(demo_path / "target"), str(demo_path / "drafter")
    alone = describe("ngram")
    assert (alone.parts[0].name, alone.misfits, alone.to_json()["fit"]) == ("ngram:3", (), None)
    for asked in ((target, "ngram:2"), ("ngram:2", target)):
        both = describe(*asked)
        assert [part["kind"] for part in json.loads(json.dumps(both.to_json()))["checkpoints"]] == [
            "target",
            "ngram",
        ]
        assert (both.misfits, both.to_json()["fit"]) == ((), True)
        assert both.kv_bytes_per_token == describe(target).kv_bytes_per_token + 4
        assert "Target and n-grams fit" in both.to_text()
    for asked in ((head, "ngram"), ("ngram", "ngram")):
        assert "both draft and neither is a target" in describe(*asked).to_text()


def test_without_drafts_there_is_no_table(random_pair: Pair) -> None:
    """A token of text takes 4 bytes beside the target's KV."""
    plain, ngrams, head = (
        page_budget(config_of(random_pair, **changes), random_pair.models).page_bytes
        for changes in ({"num_spec_tokens": 0, "drafter": "ngram"}, {"drafter": "ngram"}, {})
    )
    assert ngrams - plain == 4 * 4
    assert head > ngrams


def test_a_run_is_resumed_with_the_same_ngrams(tmp_path: Path) -> None:
    """Others may give other texts when sampling, and other events anyway; no checkpoint of a drafter is read."""
    rows = [{"question_id": n, "turns": [f"say {n} {n} {n}", "again"]} for n in range(3)]
    job = conversations(tmp_path, rows, baseline=True)
    job = replace(job, engine=replace(job.engine, drafter="ngram"))
    out = tmp_path / "run"
    found = run(job, out, Silent())
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["engine"]["drafter"] == manifest["fingerprints"]["drafter"] == "ngram:3"
    assert manifest["settings"]["drafter"] == "ngram:3"
    assert "drafter batch" not in manifest["settings"]
    again = run(replace(job, engine=replace(job.engine, drafter="ngram:3")), out, Silent())
    assert again.report == found.report
    for other in ("ngram:2", str(Path(job.engine.model).parent / "drafter")):
        with pytest.raises(UserError, match=re.escape(f"differs in --drafter ngram:3 -> {other}: ")):
            run(replace(job, engine=replace(job.engine, drafter=other)), out, Silent())


def test_workers_elsewhere_get_the_same_ngrams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a directory has that name, which is meant only by ``./ngram``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ngram").mkdir()
    config = EngineConfig(model="some/model", drafter="ngram")
    assert _portable(config).drafter == "ngram"
    assert _portable(replace(config, drafter="./ngram")).drafter == str(tmp_path / "ngram")
