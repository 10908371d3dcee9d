"""A device error at any launch point changes no text, log-probability or draft and leaks no page."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import specgen
from specgen.config import CONFIDENCE_LEVELS, SamplingParams
from specgen.core.engine_core import EngineCore, discard
from specgen.core.sequence import Completion, Request, ScoreRequest
from specgen.core.spec_length import FixedPlan, StepPlan
from specgen.core.step import Steps
from specgen.device import HostCopy
from specgen.engine.build import build_engine
from specgen.models.llama import Llama
from specgen.models.model_config import TargetConfig
from specgen.record.record_rows import EngineRow, OutOfMemory
from tests.engines import Pair, bundled_requests, config_of, load_pair, no_page_leaked
from tests.marks import mostly_slow
from tests.operations import Operations
from tests.tiny_checkpoints import write_dflash_head, write_eagle1_head, write_head, write_target
from tests.tiny_hybrids import write_hybrid
from tests.tiny_llama4 import write_eagle_llama4, write_llama4

ERRORS = (torch.OutOfMemoryError, RuntimeError)
CONFIGS = list(product(("greedy", "sampled"), (0, 4), (True, False), (False, True)))
GREEDY, SAMPLED = ("greedy", 4, True, True), ("sampled", 4, False, False)
SHARE = 8  # of the places that a test fails in, each of so many has its turn; other settings have the others
_PACKAGE = Path(specgen.__file__).parent
_LAUNCHING = tuple(str(_PACKAGE / name) for name in ("core/", "decoding/", "kv/", "device.py"))
_NO_FAULT = nullcontext()


class AtOp(Operations):
    """Raises at the operations of those ``numbers``, counted from 1 where it is in force, or from ``first_step``."""

    def __init__(self, error: type[RuntimeError], *numbers: int, first_step: int = 1) -> None:
        super().__init__()
        self.step, self.raised = 0, 0
        self.numbers, self._error, self._first_step, self._count = numbers, error, first_step, 0

    @property
    def wanted(self) -> bool:
        """It slows down what runs under it."""
        return self.step >= self._first_step and self.raised < len(self.numbers)

    def __repr__(self) -> str:
        return f"{self._error.__name__} at operations {self.numbers} from step {self._first_step} on"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _begins_capture():
            return func(*args, **kwargs or {})
        self._count += 1
        if self._count in self.numbers:
            self.raised += 1
            raise self._error("planted")
        return func(*args, **kwargs or {})


class Launches(Operations):
    """Records by function of the engine what it launches: each operation's step, and its number in it from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.wanted = 0, True
        self.places: dict[str, list[tuple[int, int]]] = {}
        self._step, self._count = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _begins_capture():
            return func(*args, **kwargs or {})
        self._step, self._count = self.step, self._count + 1 if self._step == self.step else 1
        self.places.setdefault(_launched_by(), []).append((self._step, self._count))
        return func(*args, **kwargs or {})


@contextmanager
def in_steps(mode: AtOp | Launches) -> Iterator[None]:
    """``mode`` in the steps of an engine that want it."""
    step = EngineCore.step

    def counted(engine: EngineCore) -> list[Completion]:
        mode.step += 1
        with mode if mode.wanted else nullcontext():
            return step(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCore, "step", counted)
        yield


def _begins_capture() -> bool:
    """Whether torch launches this itself to begin a CUDA graph; an error there aborts the process in ``~CUDAGraph``."""
    frame = sys._getframe(2)
    while (
        "_dynamo" in frame.f_code.co_filename and frame.f_back is not None
    ):  # wraps a dispatch in some versions
        frame = frame.f_back
    return frame.f_code.co_filename.endswith("torch/cuda/graphs.py")


def _launched_by() -> str:
    """The innermost function of the engine on the stack, without the models that it calls."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_LAUNCHING):
            return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


@dataclass
class Planted:
    """An error in the calls of those ``numbers`` of a point: before, after or in the middle of it."""

    numbers: list[int]
    when: str
    error: type[RuntimeError]
    calls: int = 0
    raised: int = 0

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls not in self.numbers:
                return work(*args, **kwargs)
            self.raised += 1
            if self.when == "inside":
                with AtOp(self.error, 2):
                    work(*args, **kwargs)
            elif self.when == "after":
                work(*args, **kwargs)
            raise self.error("planted")

        return call


@contextmanager
def planted(owner: type, name: str, fault: Planted) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fault.around(getattr(owner, name)))
        yield


@dataclass
class Run:
    """Texts, log-probabilities and steps by request, of its last attempt."""

    completions: dict[str, Completion] = field(default_factory=dict)

    def differences(self, other: "Run", with_steps: bool = True) -> list[str]:
        """The requests in which ``other`` differs, except those that failed."""
        found = [] if self.completions.keys() == other.completions.keys() else ["other requests"]
        for name, theirs in other.completions.items():
            mine = self.completions[name]
            if theirs.error is None and (
                mine.token_ids != theirs.token_ids
                or (with_steps and _steps(mine) != _steps(theirs))
                or not _same_logprobs(mine, theirs)
            ):
                found.append(name)
        return found

    @property
    def errors(self) -> list[str]:
        return [each.error for each in self.completions.values() if each.error is not None]


def _steps(completion: Completion) -> list[tuple[Any, ...]]:
    return [step[1:] for step in completion.record.steps or ()]


def _same_logprobs(mine: Completion, theirs: Completion) -> bool:
    if mine.logprobs is None or theirs.logprobs is None:
        return mine.logprobs is theirs.logprobs
    pairs = zip(mine.logprobs, theirs.logprobs, strict=True)
    return all(abs(a.chosen - b.chosen) < 1e-3 and len(a.top) == len(b.top) for a, b in pairs)


@dataclass
class Setting:
    """An engine as a test parameter describes it, and its requests."""

    pair: Pair
    kind: str
    k: int
    prefix_cache: bool
    ahead: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    plan: StepPlan | None = (
        None  # of every step; which drafts are verified then is by who else is in the batch
    )

    @property
    def config(self) -> tuple[str, int, bool, bool]:
        return self.kind, self.k, self.prefix_cache, self.ahead

    @property
    def index(self) -> int:
        """A seed by setting, so that settings differ in which calls fail."""
        return CONFIGS.index((self.kind, self.k, self.prefix_cache, False))

    def requests(self) -> list[Request]:
        """Requests with a shared prefix and several lengths, of which one has log-probabilities and one penalties."""
        temperature = 0.0 if self.kind == "greedy" else 0.8
        sampling = SamplingParams(max_tokens=9, temperature=temperature, seed=3)
        start, *some = bundled_requests(5, sampling)
        prefix = start.prompt_token_ids[:9]
        own: list[dict[str, Any]] = [{"repetition_penalty": 1.5, "frequency_penalty": 0.5}, {"logprobs": 2}]
        return [
            replace(
                request,
                prompt_token_ids=(*prefix, *request.prompt_token_ids),
                sampling=replace(sampling, max_tokens=9 - 2 * n, **dict(enumerate(own)).get(n, {})),
            )
            for n, request in enumerate(some)
        ]

    def engine(self, record: Callable[[EngineRow], None] = discard) -> EngineCore:
        changes: dict[str, Any] = {
            "num_spec_tokens": self.k,
            "prefix_cache": self.prefix_cache,
            "max_batch_size": 3,
            "max_prefill_tokens": 48,  # some prompts are prefilled in two chunks
        } | self.settings
        engine = build_engine(config_of(self.pair, **changes), self.pair.models, record)
        if self.plan is not None:
            engine.spec_length = FixedPlan(self.plan)
        return engine


def run(engine: EngineCore, setting: Setting, result: Run, *, close_at: int | None = None) -> Run:
    """Generate, and check that no page leaks; the caller closes the iterator after ``close_at`` completions."""
    completions = engine.generate(setting.requests())
    for completion in completions:
        result.completions[completion.request.id] = completion
        if len(result.completions) == close_at:
            completions.close()
    assert no_page_leaked(engine)
    return result


def attempt(
    setting: Setting, fault: AbstractContextManager[object] = _NO_FAULT, *, close_at: int | None = None
) -> list[Run]:
    """Two runs of one engine, ``fault`` in the first, so that the second uses its caches."""
    results = [Run()]
    engine = setting.engine()
    with fault:
        run(engine, setting, results[0], close_at=close_at)
    results.append(Run())
    run(engine, setting, results[1])
    return results


def _name(value: Any) -> str | None:
    if not isinstance(value, tuple):
        return None
    kind, k, prefix_cache, ahead = value
    return f"{kind}-K{k}-{'cache' if prefix_cache else 'no-cache'}-{'lookahead' if ahead else 'sync'}"


def in_settings(
    names: str, others: Iterable[Any], *quick: Any, alternating: bool = False
) -> pytest.MarkDecorator:
    """A test in every setting, and for all of its other parameters; where they alternate, half of them in each."""
    cases = [
        (config, *each)
        for at, config in enumerate(CONFIGS)
        for number, each in enumerate(product(*others))
        if not alternating or (at + number + number // 2) % 2 == 0
    ]
    return pytest.mark.parametrize(
        ("setting", *names.split()), mostly_slow(cases, *quick), indirect=["setting"], ids=_name
    )


@pytest.fixture
def setting(request: pytest.FixtureRequest, demo_pair: Pair, device_like: Callable[..., None]) -> Setting:
    kind, k, prefix_cache, ahead = request.param
    device_like(ahead)
    return Setting(demo_pair, kind, k, prefix_cache, ahead)


@dataclass(kw_only=True)
class FaultFree:
    """Two runs of one engine without an error."""

    setting: Setting
    results: list[Run]

    @cached_property
    def places(self) -> dict[str, list[tuple[int, int]]]:
        """The operations of the first run as ``Launches`` has them."""
        launches, engine = Launches(), self.setting.engine()  # which on a GPU takes steps of its own
        with in_steps(launches):
            run(engine, self.setting, Run())
        return launches.places


@pytest.fixture(scope="module")
def fault_free_runs() -> dict[tuple[str, int, bool, bool], FaultFree]:
    return {}


@pytest.fixture
def right(setting: Setting, fault_free_runs: dict[tuple[str, int, bool, bool], FaultFree]) -> FaultFree:
    """Computed once for all tests of a setting."""
    if setting.config not in fault_free_runs:
        fault_free_runs[setting.config] = run_without_fault(setting)
    return fault_free_runs[setting.config]


def run_without_fault(setting: Setting) -> FaultFree:
    results = attempt(setting)
    assert not any(each.errors for each in results)
    return FaultFree(setting=setting, results=results)


@pytest.mark.parametrize(
    ("setting", "error"),
    mostly_slow(
        # so each place has its turn with lookahead and without
        [(config, ERRORS[(config[0] == "sampled") == config[2]]) for config in CONFIGS],
        (("greedy", 4, True, False), torch.OutOfMemoryError),
    ),
    indirect=["setting"],
    ids=_name,
)
def test_an_error_at_any_launch_changes_no_result(
    setting: Setting, right: FaultFree, error: type[RuntimeError]
) -> None:
    require_no_change(setting, right, error)


HEADS: dict[str, Callable[[Path, TargetConfig], None]] = {
    "eagle-1": partial(write_eagle1_head, fc_bias=True),
    "two-layers": partial(write_head, num_layers=2, windows=[None, 9]),
    "p-eagle": partial(write_head, num_layers=2, mask_token=("ptd_token_id", 4)),
    "dflash2": partial(write_dflash_head, second=(2, 4, 8)),
    "dspark": partial(
        write_dflash_head, dialect="DeepSpec", markov=("rnn", 16), windows=[9, None], confidence=True
    ),
}


def written(kind: str, path: Path) -> Pair:
    """A pair with that head, or of that family."""
    target, drafter = path / "target", path / "drafter"
    if kind == "hybrid":  # its states have moved on by then, or have not
        write_hybrid(target, mtp=True, vocab_size=3072)
        return load_pair(path, drafter="mtp")
    if kind == "llama4":
        write_eagle_llama4(drafter, write_llama4(target, num_hidden_layers=4, vocab_size=3072))
    else:
        HEADS[kind](drafter, write_target(target, vocab_size=3072))
    return load_pair(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error"),
    [*zip(HEADS, (*ERRORS, *ERRORS, ERRORS[0]), strict=True), ("hybrid", ERRORS[0]), ("llama4", ERRORS[1])],
)
def test_an_error_changes_no_result_with_other_heads_and_targets(
    tmp_path: Path, device_like: Callable[..., None], kind: str, error: type[RuntimeError]
) -> None:
    pair = written(kind, tmp_path)
    device_like()
    setting = Setting(pair, "greedy", 4, True, True)
    require_no_change(setting, run_without_fault(setting), error)


class Constrained(Setting):
    """All but the first of its requests are constrained, by several automata."""

    def requests(self) -> list[Request]:
        first, *others = super().requests()
        words: list[dict[str, Any]] = [
            {"bad_words_ids": tuple((token, token + 1) for token in range(9, 900 + number, 7))}
            for number in range(len(others))
        ]
        words[0] = {"allowed_token_ids": tuple(range(0, 3072, 2))}
        pairs = zip(others, words, strict=True)
        return [first, *(replace(each, sampling=replace(each.sampling, **word)) for each, word in pairs)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "error"), [("greedy", ERRORS[0]), ("sampled", ERRORS[1])])
def test_an_error_changes_no_result_of_constrained_requests(
    demo_pair: Pair, device_like: Callable[..., None], kind: str, error: type[RuntimeError]
) -> None:
    device_like()
    setting = Constrained(demo_pair, kind, 4, False, True)
    require_no_change(setting, run_without_fault(setting), error)


RISING = tuple((level + 0.5) / len(CONFIDENCE_LEVELS) for level in range(len(CONFIDENCE_LEVELS)))


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "error"), [(None, ERRORS[0]), ("ngram", ERRORS[1])])
def test_an_error_changes_no_text_where_a_part_is_verified(
    demo_pair: Pair, device_like: Callable[..., None], drafter: str | None, error: type[RuntimeError]
) -> None:
    device_like()
    plan = StepPlan(num_drafts=4, quarters=6, chances=(RISING,) * 4)
    settings = {} if drafter is None else {"drafter": drafter}
    setting = Setting(demo_pair, "greedy", 4, True, True, settings, plan)
    right = run_without_fault(setting)
    plain = run_without_fault(replace(setting, plan=None))
    for mine, theirs in zip(plain.results, right.results, strict=True):
        assert mine.differences(theirs, with_steps=False) == []
    require_no_change(setting, right, error)


def planned_faults(
    setting: Setting, right: FaultFree, error: type[RuntimeError], owner: str = ""
) -> list[AtOp]:
    """One in each function that launches anything; of some a second one, in what goes on after the first.

    Of these a share, or all functions of the ``owner``.
    """
    index = setting.index + ERRORS.index(error)
    rng = Random(index)
    faults = []
    for place, launched in enumerate(each for name, each in right.places.items() if name.startswith(owner)):
        step, number = rng.choice(launched)
        second = [number + rng.randrange(1, 60)] if place % 3 == index % 3 else []
        faults.append(AtOp(error, number, *second, first_step=step))
    return faults if owner else faults[index % SHARE :: SHARE]


def require_no_change(setting: Setting, right: FaultFree, error: type[RuntimeError], owner: str = "") -> None:
    """``error`` in the places of ``planned_faults``; which operation of a place it is differs by setting."""
    for fault in planned_faults(setting, right, error, owner):
        found = attempt(setting, in_steps(fault))
        assert fault.raised, fault  # of two, the run may be over before the second
        for mine, theirs in zip(right.results, found, strict=True):
            assert mine.differences(theirs, setting.plan is None) == [], fault
        assert len(found[0].errors) <= fault.raised - 1, fault
        assert not found[1].errors, fault


@in_settings(
    "when error",
    [("before", "after"), ERRORS],
    (GREEDY, "after", torch.OutOfMemoryError),
    (SAMPLED, "before", torch.OutOfMemoryError),
    alternating=True,
)
def test_an_error_that_shows_when_results_are_read_changes_none(
    setting: Setting, right: FaultFree, when: str, error: type[RuntimeError]
) -> None:
    """A device reports what failed in a pass at the next wait for it."""
    fault = Planted([3, 4], when, error)
    found = attempt(setting, planted(HostCopy, "read", fault))
    assert fault.raised == 2
    for mine, theirs in zip(right.results, found, strict=True):
        assert mine.differences(theirs, setting.plan is None) == []
    assert len(found[0].errors) <= 1


@in_settings("error", [ERRORS], (GREEDY, RuntimeError), alternating=True)
def test_an_error_and_a_closed_iterator(
    setting: Setting, right: FaultFree, error: type[RuntimeError]
) -> None:
    """The same engine is right when used again, also where the error came just before."""
    nothing = AtOp(error)  # results in flight are dropped
    for fault in (nothing, *planned_faults(setting, right, error)[::3]):
        _, again = attempt(setting, in_steps(fault), close_at=1)
        assert right.results[0].differences(again) == [], fault


def test_a_page_is_shared_only_after_its_pass_was_launched(demo_pair: Pair) -> None:
    """The first prefill and the next step run out of memory: pages that were not filled must not be shared."""
    setting = Setting(demo_pair, "greedy", 4, True)
    right = attempt(setting)
    fault, other = (Planted([1], "before", torch.OutOfMemoryError) for _ in range(2))
    with planted(Steps, "prefill", fault), planted(Steps, "decode", other):
        found = attempt(setting)
    assert fault.raised == 1
    for mine, theirs in zip(right, found, strict=True):
        assert mine.differences(theirs, setting.plan is None) == []


def scored(pair: Pair, engine: EngineCore | None = None) -> tuple[EngineCore, dict[str, list[float]]]:
    """Log-probabilities of texts with a shared prefix, some in several chunks."""
    setting = Setting(pair, "greedy", 0, True)
    engine = engine or setting.engine(lambda event: None)
    texts = [
        ScoreRequest(id=r.id, token_ids=r.prompt_token_ids * 2, num_context=12 + n)
        for n, r in enumerate(setting.requests())
    ]
    found = {each.request.id: list(each.log_probs) for each in engine.score(texts)}
    return engine, found


fails_alone = partial(pytest.raises, RuntimeError, match="again when tried alone")

SCORING = (
    *product([(Steps, "score")], ("inside", "before", "after")),
    ((Llama, "forward"), "after"),
    ((Llama, "logits"), "after"),
)


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("point", "when"), SCORING, ids=lambda value: value if isinstance(value, str) else value[1]
)
def test_an_error_while_scoring_changes_no_logprob(
    demo_pair: Pair, point: tuple[type, str], when: str, error: type[RuntimeError]
) -> None:
    _, right = scored(demo_pair)
    for numbers in ([1], [3], [1, 2]):
        engine = Setting(demo_pair, "greedy", 0, True).engine(lambda event: None)
        with pytest.MonkeyPatch.context() as patch:
            fault = Planted(numbers, when, error)
            patch.setattr(*point, fault.around(getattr(*point)))
            # a text that fails again alone ends the run
            twice = fails_alone if len(numbers) == 2 and error is RuntimeError else nullcontext
            found: dict[str, list[float]] = {}
            with twice():
                found = scored(demo_pair, engine)[1]
        assert fault.raised == len(numbers)
        again = scored(demo_pair, engine)[1]
        assert len(found) == (0 if twice is fails_alone else len(right))
        for name in right:
            assert found.get(name, right[name]) == pytest.approx(right[name], abs=1e-4)
            assert again[name] == pytest.approx(right[name], abs=1e-4)
        assert no_page_leaked(engine)


def test_limits_recover_after_an_error(demo_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one out-of-memory error in the first step the batch grows back to its size."""
    monkeypatch.setattr("specgen.core.scheduler._QUIET", 6)
    setting, results = Setting(demo_pair, "greedy", 0, True), [Run()]
    lowered: list[OutOfMemory] = []
    engine = setting.engine(lambda e: lowered.append(e) if isinstance(e, OutOfMemory) else None)
    with planted(Steps, "decode", Planted([1], "before", torch.OutOfMemoryError)):
        run(engine, setting, results[0])
    limits = engine._scheduler.limits
    assert [event.max_batch_size for event in lowered] == [1]
    assert limits.max_batch_size == 3
