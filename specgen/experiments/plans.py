"""What is known before a weight is read: requests, the arms that can run and their memory; a dry run prints it."""

import gc
import itertools
import platform
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

import torch

from specgen.checkpoints import lora
from specgen.checkpoints.fingerprint import fingerprint
from specgen.checkpoints.inspect_checkpoint import Weights
from specgen.config import EngineConfig, SamplingParams, UserError, require
from specgen.config.json_fields import load_json
from specgen.core.sequence import Completion, Request
from specgen.engine import step_costs
from specgen.engine.arms import Arm
from specgen.engine.build import most_demanding, page_budget, state_bytes
from specgen.engine.choices import Checkpoints, needed_modules, resolve
from specgen.engine.conversations import first_turns, greedy
from specgen.engine.generation_config import FILE, GenerationConfig, generation_config
from specgen.engine.loading import Models, load_models, open_checkpoints, outline
from specgen.experiments.rounds import LEAST, RECORD, num_kept
from specgen.experiments.tune_job import RANDOM, TuneJob, Workload
from specgen.ops.jit_modules import compile_missing
from specgen.prompts import Prompt, Rejected
from specgen.prompts.load import RAW
from specgen.prompts.prompt import single_turns
from specgen.record.provenance import cpu_name, manifest, versions, with_recorded_date
from specgen.report import display
from specgen.report.display import several
from specgen.report.grid import Figure, Grid
from specgen.report.table import Row
from specgen.report.terminal import Part
from specgen.text.tokenizer import Tokenizer

_WARM_UP = 192  # positions per sequence during warm-up
_SHOWN = 3  # reasons in an error
_NOTHING = GenerationConfig()


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The requests, how they were made, and what was left out."""

    requests: tuple[Request, ...]
    description: str
    notes: tuple[str, ...]


def make_prompts(
    workload: Workload,
    models: Models,
    count: int,
    generation_defaults: GenerationConfig = _NOTHING,
) -> Prompts:
    """``count`` greedy requests, repeated if the data set has fewer; ``UserError`` if none can run.

    For synthetic weights prompts have the lengths of the data set's and random tokens of the known text, or else of the
    vocabulary (a head's, if there is one); random prompts ignore EOS, so their texts have ``max_new_tokens``. Others
    have the checkpoint's ``generation_defaults``.
    """
    if workload.dataset == RANDOM:
        lengths = [(workload.prompt_tokens, workload.max_new_tokens)] * count
        return Prompts(
            requests=_random(lengths, models),
            description=f"{several(count, 'prompt')} of {workload.prompt_tokens} random tokens",
            notes=(),
        )
    opened = replace(workload, num_prompts=count).open()
    prompts = list(opened)
    turns, what, longest = prompts, "first turns", workload.max_new_tokens
    sampling = generation_defaults.over(SamplingParams(max_tokens=longest))
    if workload.output_lens == "data":
        turns = [turn for each in prompts for turn in _recorded_turns(each, models.tokenizer, longest)]
        what = "turns"
        # its length alone ends a text
        sampling = replace(sampling, ignore_eos=True, stop=(), stop_token_ids=(), min_tokens=0)
    asked, failures = first_turns(turns, models.tokenizer, sampling)
    asked, sampled = greedy(asked)
    requests, notes = _fitting(asked, models, workload)
    notes += (*opened.notes.sentences(), *sampled, *_in_short(failures))
    require(bool(requests), f"no prompt of {workload.dataset} can run: {'; '.join(notes[:_SHOWN])}")
    again = f", repeated to {count}" if len(requests) < count else ""
    description = f"{min(len(requests), count)} {what} of {workload.dataset}{again}"
    requests = _filled(requests, count)
    if models.synthetic:
        lengths = [(len(request.prompt_token_ids), request.sampling.max_tokens) for request in requests]
        requests, description = _random(lengths, models), f"random tokens, as long as {description}"
    elif workload.output_lens == "fixed" and models.tokenizer.chat_template and opened.are_raw(prompts):
        notes += (RAW,)
    return Prompts(requests=requests, description=description, notes=notes)


def _in_short(failures: Sequence[str]) -> tuple[str, ...]:
    """A note for each failure; where there are many, the first of them and their number."""
    rest = len(failures) - _SHOWN
    more = (f"left out: {rest} more rows",) if rest > 0 else ()
    return tuple(f"left out: {each}" for each in failures[:_SHOWN]) + more


def _fitting(
    requests: list[Request], models: Models, workload: Workload
) -> tuple[tuple[Request, ...], tuple[str, ...]]:
    """The requests that fit the model's context with their new tokens, and a note on the others."""
    limit = models.target.config.max_positions
    fitting = tuple(r for r in requests if len(r.prompt_token_ids) + r.sampling.max_tokens <= limit)
    missing = len(requests) - len(fitting)
    new = (
        "their answers' tokens" if workload.output_lens == "data" else f"{workload.max_new_tokens} new tokens"
    )
    note = f"left out: {missing} prompts that with {new} exceed a context of {limit}"
    return fitting, (note,) if missing else ()


def _filled(requests: tuple[Request, ...], count: int) -> tuple[Request, ...]:
    """``count`` requests, repeated under new ids if they are too few."""
    rounds = ((number, request) for number in itertools.count() for request in requests)
    return tuple(
        replace(request, id=f"{request.id} again {number}") if number else request
        for number, request in itertools.islice(rounds, count)
    )


def _random(lengths: Sequence[tuple[int, int]], models: Models) -> tuple[Request, ...]:
    """A request per pair of prompt length and output length, in tokens."""
    known, head = KnownText.of(models), models.head
    vocabulary: Sequence[int] = range(models.target.config.vocab_size)
    if known is not None:
        vocabulary = sorted(known.follower)  # other tokens have no known follower
    elif head is not None:
        vocabulary = head.draft_to_target.tolist()
    rng = random.Random(0)
    return tuple(
        Request(
            id=f"random {index}",
            prompt_token_ids=tuple(rng.choices(vocabulary, k=length)),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        for index, (length, max_tokens) in enumerate(lengths)
    )


def kv_bytes(config: EngineConfig, models: Models, requests: Sequence[Request]) -> int:
    """Bytes of KV pages for the longest requests that can be in the batch together, and of states for the batch."""
    length = config.draft_length
    timed = step_costs.positions(config.max_batch_size, length.most, config.max_prefill_tokens)
    least = timed if length.auto else _WARM_UP
    lengths = sorted(
        (max(len(r.prompt_token_ids) + r.sampling.max_tokens, least) for r in requests), reverse=True
    )
    budget = page_budget(config, models)
    pages = budget.for_sequences(lengths[: config.max_batch_size])
    return budget.bytes_with(pages) + state_bytes(config, models.target.config, config.max_batch_size)


@dataclass(frozen=True, kw_only=True)
class KnownText:
    """A cycle of tokens: each one determines the next."""

    follower: Mapping[int, int]
    accept: float  # share of the tokens whose follower the drafter knows
    max_positions: int  # of prompt and text

    @classmethod
    def of(cls, models: Models) -> "KnownText | None":
        """The known text of ``models``; None without one, or if the drafter's own vocabulary has other tokens."""
        file = models.checkpoints["model"].path.resolve().parent / "cycle.json"
        if not (models.synthetic and file.is_file()):
            return None
        cycle = load_json(file, "make the pair again")
        tokens, head = cycle["tokens"], models.head
        vocabulary = tokens  # of the drafts, where that is a part of the target's
        if head is not None and head.config.draft_vocab_size < head.config.vocab_size:
            vocabulary = head.draft_to_target.tolist()
        if not set(vocabulary) <= set(tokens):
            return None
        return cls(
            follower=dict(zip(tokens, [*tokens[1:], tokens[0]], strict=True)),
            accept=cycle["accept"],
            max_positions=models.target.config.max_positions,
        )

    def num_wrong(self, completions: Iterable[Completion]) -> int:
        """Tokens that differ from the known text, missing and surplus ones included."""
        wrong = 0
        for completion in completions:
            prompt, token_ids = completion.request.prompt_token_ids, completion.token_ids
            length = min(completion.request.sampling.max_tokens, self.max_positions - len(prompt))
            text = [self.follower[prompt[-1]]]
            while len(text) < length:
                text.append(self.follower[text[-1]])
            wrong += sum(ours != known for ours, known in zip_longest(token_ids, text))
        return wrong


def _recorded_turns(
    prompt: Prompt | Rejected, tokenizer: Tokenizer, longest: int
) -> Iterator[Prompt | Rejected]:
    """A prompt for every turn that has an answer in the data, of whose number of tokens the new one is to be.

    Answers before it are the data's too. Of a row that sets ``max_tokens`` itself that is the length.
    """
    if isinstance(prompt, Rejected):
        yield prompt
        return
    answers = [each.text for each in prompt.recorded[::2]]
    lengths = [max(1, len(tokenizer.encode_rendered(text))) for text in answers]
    questions = tuple(each.text for each in prompt.recorded[1::2])
    turns = single_turns(replace(prompt, follow_ups=questions, recorded=()), answers)
    if "max_tokens" in prompt.sampling:
        turns, lengths = iter([prompt]), [int(prompt.sampling["max_tokens"])]
    elif not answers:
        reason = "it has no answer whose length to take, nor max_tokens; --output-lens fixed needs neither"
        yield Rejected(id=prompt.id, reason=reason)
    for turn, length in zip(turns, lengths, strict=True):
        yield replace(turn, sampling={"max_tokens": min(length, longest)})


# --- the requests --------------------------------------------------------------------------------------

_OVERHEAD = {"cpu": 0, "cuda": 1 << 30}  # bytes of an engine beside its KV cache: workspaces and graphs


def environment(device: str) -> dict[str, str]:
    """The name of the GPU or CPU, and the versions of the software."""
    on_cpu = device == "cpu"
    found = {
        "device": cpu_name() if on_cpu else torch.cuda.get_device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if on_cpu:
        return found
    return found | {"cuda": str(torch.version.cuda), "flashinfer": versions()["flashinfer-python"]}


def conditions(config: EngineConfig, models: Models) -> Row:
    """The environment, target, drafter and dtype, and whether the weights are synthetic."""
    weights = "synthetic" if models.synthetic else "as trained"
    return {
        **environment(config.device),
        **({} if config.tensor_parallel == 1 else {"tensor parallel": config.tensor_parallel}),
        "model": f"{display.checkpoint_name(config.model)}, {config.formats}, weights {weights}",
        **({} if config.lora is None else {"LoRA": lora.summary(models.checkpoints["model"])}),
        "drafter": display.checkpoint_name(str(config.drafter)),
    }


def free_memory() -> None:
    """Return unreferenced memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An arm that can run here, and its memory."""

    arm: Arm
    config: EngineConfig  # resolved
    requests: tuple[Request, ...]
    kv_bytes: int  # of the requests in the batch
    overhead: int  # bytes of the engine beside its KV cache

    @classmethod
    def of(cls, arm: Arm, config: EngineConfig, models: Models, requests: tuple[Request, ...]) -> Self:
        """The plan of an arm with its resolved ``config``; ``models`` may be without weights."""
        need, overhead = kv_bytes(config, models, requests), _OVERHEAD[torch.device(config.device).type]
        return cls(arm=arm, config=config, requests=requests, kv_bytes=need, overhead=overhead)

    @property
    def num_bytes(self) -> int:
        """Bytes that the engine takes beside the weights."""
        return self.kv_bytes + self.overhead


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a tune has before it begins: its pair, without weights, and plans; ``notes`` say which arms have none."""

    job: TuneJob
    output: Path | None
    base: EngineConfig  # resolved
    checkpoints: Checkpoints
    models: Models  # on the device meta
    prompts: Prompts
    plans: list[Plan]
    notes: list[str]
    generation_defaults: GenerationConfig

    def load(self) -> Models:
        """The pair with its weights; what any of the arms needs compiled is, all of it at once."""
        compile_missing(
            module
            for plan in self.plans
            for module in needed_modules(
                plan.config, self.checkpoints, most_demanding(each.sampling for each in plan.requests)
            )
        )
        return load_models(self.base, self.checkpoints)

    def manifest(self) -> dict[str, Any]:
        """What decides the numbers: device, versions, weights, requests, and the job. Fingerprints read all weights."""
        tokens = sha256()
        for request in self.prompts.requests:
            tokens.update(f"{request.prompt_token_ids} {request.sampling}\n".encode())
        workload = self.job.workload
        path = str(workload.data_path) if workload.data_path else None
        data = {"dataset": workload.dataset, "data_path": path, "requests": tokens.hexdigest()}
        found = manifest(
            engine=self.base,
            sampling=self.generation_defaults.over(SamplingParams(max_tokens=workload.max_new_tokens)),
            data=data,
            fingerprints={role: fingerprint(each) for role, each in self.checkpoints.items()},
        )
        return found | {"bench": self.job.to_json()}


def prepare(job: TuneJob, output: Path | None = None) -> Setup:
    """Resolve everything; chat templates see the date of an earlier tune in ``output``, which goes on.

    ``UserError`` if no arm can run, or no prompt.
    """
    engine, workload = job.base, job.workload
    checkpoints = open_checkpoints(engine)
    base = resolve(engine, checkpoints)
    if output is not None:
        base = with_recorded_date(base, engine, output / RECORD)
    models = outline(base, checkpoints)
    generation_defaults = generation_config(checkpoints["model"], base.generation_config)
    count = max(map(workload.count, job.batches))
    prompts = make_prompts(workload, models, count, generation_defaults)
    if engine.synthetic_acceptance:  # an end is found by chance in such a text
        whole = (replace(each, sampling=replace(each.sampling, ignore_eos=True)) for each in prompts.requests)
        prompts = replace(prompts, requests=tuple(whole))
    plans: list[Plan] = []
    notes: list[str] = []
    for arm in job.arms:
        try:
            config = resolve(arm.configure(engine), checkpoints)
            config.synthetic_chances()  # refuses a length that this K cannot have
        except UserError as error:
            notes.append(f"not run: {arm.name}: {error}")
            continue
        requests = prompts.requests[: workload.count(config.max_batch_size)]
        plans.append(Plan.of(arm, config, models, requests))
    any_drafts = any(plan.config.draft_length.most for plan in plans) or not engine.synthetic_acceptance
    require(bool(plans) and any_drafts, f"no arm can run here: {notes[0] if notes else 'none is asked for'}")
    return Setup(
        job=job,
        output=output,
        base=base,
        checkpoints=checkpoints,
        models=models,
        prompts=prompts,
        plans=plans,
        notes=[
            *(f"{FILE}: {each}" for each in [generation_defaults.sentence()] if each),
            *prompts.notes,
            *notes,
        ],
        generation_defaults=generation_defaults,
    )


def all_together(plans: Sequence[Plan], room: int) -> list[Plan]:
    """``plans`` as one group: with the KV cache that their requests need, or an equal part each of too little room.

    A KV cache whose size the user gave keeps it.
    """
    if plans[0].config.kv_memory is not None:
        return list(plans)
    if sum(plan.num_bytes for plan in plans) <= room:
        return [with_kv_size(plan) for plan in plans]
    return [replace(plan, config=replace(plan.config, kv_memory=room // len(plans))) for plan in plans]


def with_kv_size(plan: Plan) -> Plan:
    """``plan`` with the KV cache that its requests need."""
    return replace(plan, config=replace(plan.config, kv_memory=plan.kv_bytes))


_GB = 1e9
_OF_PLANS = (
    Figure(name="arm", of=lambda plan: plan.arm.name),
    Figure(name="prompts", of=lambda plan: len(plan.requests)),
    Figure(name="new_tokens", of=lambda plan: sum(each.sampling.max_tokens for each in plan.requests)),
    Figure(name="engine", unit="GB", of=lambda plan: plan.num_bytes / _GB),
)


def forecast(setup: Setup) -> Iterator[Part]:
    """What ``--dry-run`` prints: the arms, then a few sentences; rounds that are kept are not taken off."""
    most, budget = setup.job.repeats, setup.job.budget
    least = min(LEAST, most) if setup.job.precision else most
    repeats = Figure(name="repeats", of=lambda _: str(least) if least == most else f"{least} to {most}")
    grid = Grid(groups=[({}, plan) for plan in setup.plans], figures=[*_OF_PLANS, repeats])
    yield grid.table([], "The arms")
    sentences = [_memory(setup), *setup.notes, "Nothing was run."]
    if budget is not None:
        within = (
            f"By the budget nothing begins that would not end within {display.duration(budget)}, prompts and "
        )
        sentences.insert(0, f"{within}weights counted; the batch sizes share it.")
    yield "\n".join(sentences)
    if setup.output is not None and (kept := num_kept(setup.output)):
        yield f"{several(kept, 'round')} in {setup.output} will not be measured again."


def _memory(setup: Setup) -> str:
    """Weights as stored, the largest engine, and what the device has."""
    models = setup.models
    configs = {
        "model": models.target.config,
        **({} if models.head is None else {"drafter": models.head.config}),
    }
    weights = sum(Weights.of(setup.checkpoints[role], config).num_bytes for role, config in configs.items())
    largest = max(plan.num_bytes for plan in setup.plans)
    found = f"Weights take {weights / _GB:.2f} GB as stored, the largest engine beside them {largest / _GB:.2f} GB"
    if setup.base.device == "cpu":
        return f"{found}."
    free, total = torch.cuda.mem_get_info(setup.base.device)
    return f"{found}; {free / _GB:.1f} of {total / _GB:.1f} GB of the GPU are free."
