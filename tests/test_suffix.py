"""Drafts from answers that have ended: they equal a naive search, texts are the target's, and runs begin alike."""

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specgen.checkpoints.checkpoint import open_checkpoint
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import EngineConfig, SamplingParams, StructuredOutputs
from specgen.config.bundled import data_directory
from specgen.core.engine_core import EngineCore
from specgen.core.sequence import Request
from specgen.decoding import answer_pool
from specgen.decoding.answer_pool import AnswerPool, table_of
from specgen.decoding.ngram import NgramDrafter
from specgen.decoding.outcome import NO_DRAFT, DraftState
from specgen.engine.earlier_answers import given_answers, newest_answers, require_same_tokens
from specgen.engine.engine import Engine
from specgen.engine.memory_plan import memory_plans
from specgen.engine.warm_engine import WarmEngine
from specgen.jobs.ray_engine import _portable
from specgen.jobs.run import run
from specgen.record.files import Rows
from specgen.record.interrupt import StoppedError
from tests.commands import printed, refused, specgen
from tests.engines import Pair, engine_of, generate, loaded
from tests.jobs import Silent, conversations
from tests.marks import mostly_slow
from tests.test_ngram import END, GREEDY, copying
from tests.test_ngram import naive as own_text

CPU = torch.device("cpu")
Answers = Sequence[Sequence[int]]


def naive(answers: Answers, text: Sequence[int], longest: int, k: int) -> tuple[int, float, list[int]]:
    """Length, share and continuation of the longest match of ``text``'s end, token by token."""
    for n in range(min(longest, len(text)), 0, -1):
        found = [
            (answer, end)
            for answer in answers
            for end in range(n, len(answer) + 1)
            if list(answer[end - n : end]) == list(text[-n:])
        ]
        going_on = [(answer, end) for answer, end in found if end < len(answer)]
        if going_on:
            drafts, left = list[int](), going_on
            first = Counter(answer[end] for answer, end in left).most_common(1)[0][1]
            while left and len(drafts) < k:
                counts = Counter(answer[end] for answer, end in left)
                most = max(counts.values())
                token = next(answer[end] for answer, end in reversed(left) if counts[answer[end]] == most)
                drafts.append(token)
                left = [(answer, end + 1) for answer, end in left if answer[end] == token]
                left = [(answer, end) for answer, end in left if end < len(answer)]
            return n, first / (len(found) + 1), drafts
    return 0, 0.0, []


def pool_of(answers: Answers, longest: int = 3, capacity: int = 400) -> AnswerPool:
    pool = AnswerPool(longest=longest, capacity=capacity, device=CPU)
    pool.add(answers)
    pool.refresh()
    return pool


def found(pool: AnswerPool, text: Sequence[int], k: int) -> tuple[int, float, list[int]]:
    """What ``pool`` has for ``text``, with other tokens behind it."""
    texts = torch.tensor([[*text, 1, 1, 1]], dtype=torch.int32)
    drafts, matched, share = (each[0] for each in pool.lookup(texts, torch.tensor([len(text)]), k))
    tokens = drafts.tolist()
    return (
        int(matched),
        float(share) * bool(matched),
        tokens[: tokens.index(NO_DRAFT)] if NO_DRAFT in tokens else tokens,
    )


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "text", "drafts"),
    [
        ([], [5], []),
        ([[5, 6, 7]], [7], []),  # nothing follows
        ([[5, 6, 7]], [9, 5], [6, 7]),
        ([[5, 6, 7], [5, 8, 9], [5, 6, 2]], [5], [6, 2]),  # 6 twice; then the later of two
        ([[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 3], [5, 8, 9]], [5], [6, 7, 2]),  # most frequent at every token
        ([[1, 5, 6], [2, 5, 7], [2, 5, 7]], [1, 5], [6]),  # the longer match, though others are more frequent
        ([[1, 2, 3, 4], [9, 1, 2, 3, 8], [9, 1, 2, 3, 8]], [0, 1, 2, 3], [8]),  # N tokens are enough
        ([[3, 4]], [3, 4, 3], [4]),  # no match across two answers
        ([[3, 4], [5, 6]], [4, 5], [6]),
    ],
)
def test_what_is_proposed(answers: Answers, text: list[int], drafts: list[int]) -> None:
    assert found(pool_of(answers), text, 4)[2] == drafts


@pytest.mark.parametrize("longest", [1, 2, 3, 5])
@pytest.mark.parametrize("num_ids", [2, 4, 20])
def test_a_lookup_equals_the_naive_one(longest: int, num_ids: int) -> None:
    """Length, share and drafts, of texts that answers hold and of others; a pool that grows is one made at once."""
    rng = random.Random(100 * longest + num_ids)

    def text(most: int) -> list[int]:
        return [rng.randrange(num_ids) for _ in range(rng.randint(1, most))]

    for _ in range(8):
        answers = [text(25) for _ in range(rng.randint(1, 8))]
        pool = pool_of(answers, longest)
        grown = pool_of([], longest)
        for answer in answers:
            grown.add([answer])
            grown.refresh()
        grown._num_fresh = 1000
        grown.refresh()
        for _ in range(12):
            asked, k = text(10), rng.randint(1, 7)
            n, share, drafts = naive(answers, asked, longest, k)
            for each in (pool, grown):
                assert found(each, asked, k) == (n, pytest.approx(share), drafts), (answers, asked)


def test_the_table_has_each_n_gram_once_and_in_order() -> None:
    """As the search needs; behind the last are no keys."""
    tokens = torch.tensor([7, 8, 7, 8, 9, NO_DRAFT])
    keys = table_of(tokens, 2).keys
    for row, distinct in zip(keys.tolist(), (4, 5), strict=True):  # NO_DRAFT counts as a token here
        assert row == sorted(row)
        assert len(set(row)) == distinct + 1
        assert row[distinct] == torch.iinfo(torch.int64).max


def test_the_oldest_answers_make_room_and_one_that_is_too_long_keeps_its_end() -> None:
    pool = AnswerPool(longest=2, capacity=10, device=CPU)
    pool.add([[1, 2, 3], [4, 5, 6]])
    pool.refresh()
    assert [found(pool, [each], 1)[2] for each in (1, 4)] == [[2], [5]]
    pool.add([[7, 8, 9]])
    pool.refresh()
    assert [found(pool, [each], 1)[2] for each in (1, 4, 7)] == [[], [5], [8]]
    pool.add([range(20)])
    pool.refresh()
    assert [found(pool, [each], 1)[2] for each in (4, 7, 10, 11, 18)] == [[], [], [], [12], [19]]
    for _ in range(2):
        keys = pool._table.keys  # also where there were more: a search needs them in order
        assert (keys[:, 1:] >= keys[:, :-1]).all()
        pool.clear()
        pool.refresh()
    assert found(pool, [18], 1) == (0, 0.0, [])


def test_the_table_is_made_anew_when_a_quarter_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which bounds what that costs a token; the tensors that a captured step reads stay where they are."""
    pool, sizes = AnswerPool(longest=2, capacity=1000, device=CPU), list[int]()
    addresses = [each.data_ptr() for each in (pool._tokens, *pool._table)]

    def counted(tokens: torch.Tensor, longest: int) -> Any:
        sizes.append(len(tokens))
        return table_of(tokens, longest)

    monkeypatch.setattr(answer_pool, "table_of", counted)
    for number in range(400):
        pool.add([[number] * 9])
        pool.refresh()
    assert sizes[:4] == [10, 20, 30, 40]
    assert all(later > 1.25 * size for size, later in pairwise(sizes) if later < 1000)
    assert len(sizes) < 35
    assert [each.data_ptr() for each in (pool._tokens, *pool._table)] == addresses


def test_no_draft_follows_the_end_of_an_answer() -> None:
    """Nor is any behind it sure, or ``auto`` would verify it."""
    pool = pool_of([[5, 6], [7, 8, 9, 10]])
    drafter = NgramDrafter(longest=2, num_pages=3, page_size=4, device=CPU, ends=(9,), pool=pool)
    drafter._texts[1, 0], drafter._texts[2, 0] = 5, 7
    state = DraftState(tokens=torch.tensor([5, 7]), positions=torch.tensor([1, 1]), columns=())
    sampling: Any = SimpleNamespace(form=SimpleNamespace(constrained=False))
    drafts = drafter.propose(state, 4, torch.tensor([[1], [2]]), sampling)
    assert drafts.tokens.tolist() == [[6, NO_DRAFT, NO_DRAFT, NO_DRAFT], [8, 9, NO_DRAFT, NO_DRAFT]]
    assert drafts.confidence.tolist() == [[0.5, -1, -1, -1], [0.5, 0.5, -1, -1]]


# --- in an engine ---------------------------------------------------------------------------------


def test_drafts_equal_the_naive_search(random_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request after the other: the answers before it, each behind the end of its prompt, and its own text."""
    monkeypatch.setattr(answer_pool, "_GROWTH", 10**9)  # always anew
    requests = copying(10, replace(GREEDY, max_tokens=16))
    outputs = generate(random_pair, requests, drafter="suffix:3", num_spec_tokens=4, max_batch_size=1)
    assert outputs.texts == generate(random_pair, requests, num_spec_tokens=0).texts
    answers, sources = list[list[int]](), Counter[str]()
    for request in requests:
        output = outputs.completions[request.id].token_ids
        tokens, written = [*request.prompt_token_ids, output[0]], 1
        for drafts, _, emitted in outputs.verified[request.id]:
            own = own_text(tokens[1:], 3, 4)
            mine = next((n for n in (3, 2, 1) if own and _occurs_before(tokens[1:], n)), 0)
            n, _, learnt = naive(answers, tokens[1:], 3, 4)
            expected = learnt if n > mine else list(own)
            expected = expected[: expected.index(END) + 1] if END in expected else expected
            assert list(drafts) == expected
            sources["answers" if n > mine else "text" if own else "neither"] += 1
            tokens += output[written : written + emitted]
            written += emitted
        answers.append([*request.prompt_token_ids[-8:], *output])
    assert min(sources["answers"], sources["text"]) > 5


def _occurs_before(text: Sequence[int], n: int) -> bool:
    """Whether the last ``n`` tokens do."""
    return any(list(text[end - n : end]) == list(text[-n:]) for end in range(n, len(text)))


@pytest.mark.parametrize(
    "settings", mostly_slow([{"kv_memory": 300_000}, {"page_size": 1}, {"prefix_cache": False}, {}], {})
)
@pytest.mark.parametrize("pool", ["garbage", "answers", "none"])
def test_texts_are_plain_decodings_whatever_is_in_the_pool(
    random_pair: Pair, device_like: Any, pool: str, settings: dict[str, Any]
) -> None:
    requests = copying(16)
    plain = generate(random_pair, requests, num_spec_tokens=0)
    device_like(pool == "garbage")
    rng = random.Random(0)
    size = random_pair.models.target.config.vocab_size
    learnt = {
        "garbage": [[rng.randrange(size) for _ in range(300)] for _ in range(30)],
        "answers": [[*each.prompt_token_ids[-8:], *plain.texts[each.id]] for each in requests],
        "none": [],
    }[pool]
    engine = engine_of(random_pair, drafter="suffix", num_spec_tokens=4, **settings)
    engine.learn(learnt)
    completions = {each.request.id: each for each in engine.generate(requests)}
    assert {name: each.token_ids for name, each in completions.items()} == plain.texts
    steps = [step for each in completions.values() for step in each.record.steps or ()]
    accepted, drafted = sum(step.accepted for step in steps), sum(len(step.drafts) for step in steps)
    assert accepted > 0
    assert (accepted > 0.9 * drafted) == (pool == "answers")


def test_sampled_texts_are_plain_decodings_too(random_pair: Pair) -> None:
    """With the same seed, whatever is in the pool: so those of a run that was stopped are the same."""
    requests = copying(9, SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=7))
    plain = generate(random_pair, requests, num_spec_tokens=0)
    for learnt, accepts in (([], False), ([list(text) for text in plain.texts.values()], True)):
        engine = engine_of(random_pair, drafter="suffix")
        engine.learn(learnt)
        completions = list(engine.generate(requests))
        assert {each.request.id: each.token_ids for each in completions} == plain.texts
        steps = [step for each in completions for step in each.record.steps or ()]
        share = sum(step.accepted for step in steps) / sum(len(step.drafts) for step in steps)
        assert (share > 0.8) == accepts


def test_confidence_is_the_count_of_the_match(random_pair: Pair) -> None:
    """Of one that goes on once 1/2, of nine that go on alike 9/10: levels that ``auto`` learns the worth of."""
    prompt = (4, 9, 5, 7)
    plain = generate(
        random_pair, [Request(id="a", prompt_token_ids=prompt, sampling=GREEDY)], num_spec_tokens=0
    )
    answer = [*prompt, *plain.texts["a"]]
    for times, level in ((1, 5), (9, 9)):
        engine = engine_of(random_pair, drafter="suffix", num_spec_tokens=2)
        engine.learn([answer] * times)
        (found,) = engine.generate([Request(id="a", prompt_token_ids=prompt, sampling=GREEDY)])
        assert found.record.steps is not None
        assert found.record.steps[0].levels == [level, level]


def test_a_timed_run_knows_nothing_of_the_one_before(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second round would repeat the answers of the first; what the engine rehearsed is no answer either."""
    config = EngineConfig(
        model=str(demo_path / "target"),
        drafter="suffix",
        max_batch_size=2,
        device="cpu",
        dtype="float32",
        page_size=16,
        attention="sdpa",
        cuda_graphs="off",
        kv_dtype="model",
    )
    requests = copying(5, replace(GREEDY, max_tokens=10), num_ids=3)
    warm = WarmEngine(config, loaded(config), requests)
    assert warm._engine._steps.pool is not None
    assert warm._engine._steps.pool._num_tokens == 0

    def steps() -> list[Any]:
        completions = warm.run().completions.values()
        return [step[1:] for each in completions for step in each.record.steps or ()]

    first, again = steps(), steps()
    assert first == again
    monkeypatch.setattr(EngineCore, "forget", lambda engine: None)
    assert steps() != first
    assert warm._engine._steps.pool._num_tokens > 0


def test_ranks_are_told_of_answers_alone(random_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a step."""
    engine, told = engine_of(random_pair, drafter="suffix"), list[Any]()
    monkeypatch.setattr(engine._peers, "broadcast", lambda call, *given: told.append((call, *given)))
    list(engine.generate(copying(3)))
    learnt = [given[0] for call, *given in told if call is EngineCore.learn]
    assert all(learnt)
    assert sum(map(len, learnt)) == 3


def test_a_token_that_the_model_has_not_is_refused(random_pair: Pair) -> None:
    engine = engine_of(random_pair, drafter="suffix")
    with refused("an answer to learn from has token 999999, which is not in the vocabulary"):
        engine.learn([[4, 999999]])
    engine_of(random_pair, drafter="ngram").learn([[4, 999999]])  # which reads none


# --- names, memory, runs --------------------------------------------------------------------------


def test_memory_is_told_and_planned_for(demo_path: Path, random_pair: Pair) -> None:
    """What the pool takes is what the plan says."""
    target = str(demo_path / "target")
    described = describe(target, "suffix")
    assert described.misfits == ()
    assert "Target and n-grams of all answers fit" in described.to_text()
    part = described.to_json()["checkpoints"][1]
    assert (part["name"], part["kind"], part["length"]) == ("suffix:8", "suffix", 8)
    pool = engine_of(random_pair, drafter="suffix")._steps.pool
    assert pool is not None
    taken = sum(each.nbytes for each in (pool._tokens, *pool._table))
    assert taken == pytest.approx(part["pool_bytes"], rel=1e-4)
    plans = [memory_plans(target, drafter, 1 << 34)[4] for drafter in ("ngram", "suffix")]
    assert plans[1].workspace - plans[0].workspace == part["pool_bytes"]


def test_constrained_answers_are_the_same(demo_pair: Pair) -> None:
    """Forced tokens are drafted still, behind what the answers have."""
    engine_config = EngineConfig(
        model=str(data_directory() / "demo" / "target"), drafter="suffix", num_spec_tokens=4, device="cpu"
    )
    asked = SamplingParams(
        max_tokens=24,
        structured_outputs=StructuredOutputs(regex=r"\{\"n\": [0-9]{2}, \"of\": \"(cats|dogs)\"\}"),
    )
    prompts = [f"{number} pets" for number in range(6)]
    texts = {}
    for drafter in ("suffix", "ngram"):
        config = replace(engine_config, drafter=drafter, max_batch_size=2)
        with Engine(config, models=loaded(config)) as engine:
            texts[drafter] = {each.id: each.text for each in engine.generate(prompts, asked)}
    assert texts["suffix"] == texts["ngram"]
    assert all(re.fullmatch(r'\{"n": \d\d, "of": "(cats|dogs)"\}', each) for each in texts["suffix"].values())


def a_job(path: Path) -> Any:
    rows = [{"question_id": n, "turns": [f"say {n} {n} {n}", "again"]} for n in range(3)]
    job = conversations(path, rows)
    return replace(job, engine=replace(job.engine, drafter="suffix", max_batch_size=2))


def test_a_stopped_run_goes_on_with_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts are those of a run without a stop; drafts come from the answers that are there already."""
    job, whole, out, learnt = a_job(tmp_path), tmp_path / "whole", tmp_path / "run", list[Answers]()
    run(job, whole, Silent())
    rows = out / "completions.jsonl"
    with pytest.raises(StoppedError):
        run(job, out, Silent(), lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 2)
    done = [json.loads(line)["token_ids"] for line in rows.read_text().splitlines()]
    learn = Engine.learn

    def seen(engine: Engine, answers: Answers) -> None:
        learnt.append(list(answers))
        learn(engine, learnt[-1])

    monkeypatch.setattr(Engine, "learn", seen)
    run(job, out, Silent())
    assert learnt == [done]
    texts = [
        {row["id"]: row["token_ids"] for row in map(json.loads, (each / "completions.jsonl").open())}
        for each in (whole, out)
    ]
    assert texts[0] == texts[1]


def test_a_run_learns_from_an_earlier_one(tmp_path: Path) -> None:
    """Its drafts are the answers; the settings say from where."""
    job, first, again = a_job(tmp_path), tmp_path / "first", tmp_path / "again"
    before = run(job, first, Silent())
    learning = replace(job, engine=replace(job.engine, learn_from=str(first)))
    after = run(learning, again, Silent())
    lengths = [each.report.mean_acceptance_length for each in (before, after)]
    assert lengths[1] > lengths[0] + 0.5
    manifest = json.loads((again / "manifest.json").read_text())
    assert manifest["engine"]["learn_from"] == manifest["settings"]["learnt from"] == str(first)
    assert "learn_from" not in json.loads((first / "manifest.json").read_text())["engine"]
    assert _portable(learning.engine).learn_from == str(first.resolve())
    with refused("differs in --learn-from"):
        run(job, again, Silent())
    newest = newest_answers(Rows(first / "completions.jsonl"))
    assert newest == [json.loads(line)["token_ids"] for line in (first / "completions.jsonl").open()]


def test_what_cannot_be_learnt_from_is_refused(tmp_path: Path) -> None:
    job = a_job(tmp_path)

    def learning(path: Path) -> Any:
        return replace(job, engine=replace(job.engine, learn_from=str(path)))

    with refused(rf"learn-from {str(tmp_path / 'no')!r} holds no answers: name the directory of a run"):
        run(learning(tmp_path / "no"), tmp_path / "out", Silent())
    run(replace(job, engine=replace(job.engine, num_spec_tokens=0)), tmp_path / "run", Silent())
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = json.loads((Path(job.engine.model) / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = sorted(vocab, key=vocab.get)[20:22]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for model, reason in (
        (str(other), "has answers of other tokens: token 20 is .* in the earlier model's tokenizer"),
        (str(tmp_path / "gone"), "has answers of .*gone, whose tokens cannot be compared"),
    ):
        manifest["engine"]["model"] = model
        (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
        with refused(reason):
            run(learning(tmp_path / "run"), tmp_path / "out", Silent())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("completions.jsonl", "", "learn-from .*run' holds no answers: name the directory"),
        ("completions.jsonl", '{"id": "a", "token_ids": null}', "the row of 'a' has no token ids: name"),
        ("completions.jsonl", '{"id": "a", "token_ids": ["b"]}', "the row of 'a' has no token ids: name"),
        ("manifest.json", '{"engine": 5}', "has answers of None, whose tokens cannot be compared"),
    ],
)
def test_a_directory_of_something_else_is_refused(
    tmp_path: Path, demo_path: Path, file: str, content: str, reason: str
) -> None:
    path, target = tmp_path / "run", str(demo_path / "target")
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"engine": {"model": target}}))
    (path / "completions.jsonl").write_text('{"id": "a", "token_ids": [4, 5]}\n')
    config = EngineConfig(model=target, drafter="suffix", learn_from=str(path))
    require_same_tokens(config, open_checkpoint(target))
    assert given_answers(config) == [[4, 5]]
    (path / file).write_text(content + "\n" * bool(content))
    with refused(reason):
        require_same_tokens(config, open_checkpoint(target))
        given_answers(config)


def test_the_output_itself_is_refused_before_it_is_renamed(tmp_path: Path) -> None:
    job, out = a_job(tmp_path), tmp_path / "run"
    run(job, out, Silent())
    again = replace(job, restart=True, engine=replace(job.engine, learn_from=f"{out}/"))
    with refused("learn-from .* is the output itself"):
        run(again, out, Silent())
    assert (out / "completions.jsonl").exists()
    assert not (tmp_path / "run.1").exists()


@pytest.mark.slow
def test_commands_take_the_name(tmp_path: Path) -> None:
    small = ("--num-prompts", "2", "--max-new-tokens", "8", "--device", "cpu")
    compared = json.loads(
        printed(
            "compare",
            "--drafter",
            "suffix",
            "--drafter",
            "ngram",
            *small,
            "--repeats",
            "0",
            "--json",
            "--quiet",
        )
    )
    assert {each["head"] for each in compared["runs"]} == {"suffix:8", "ngram:3"}
    tuned = specgen(
        "tune", "--drafter", "suffix", *small, "--batch", "1", "--k", "2", "--repeats", "2", "--quiet"
    )
    assert tuned.exit_code == 0, tuned.output
    assert "suffix:8" in printed("inspect", "suffix")
    said = specgen("generate", "--drafter", "ngram", "--learn-from", str(tmp_path), *small)
    assert "learn-from changes nothing without --drafter suffix: leave it out" in said.stderr
