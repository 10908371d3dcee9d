"""The losslessness audit: the same prompts, greedy, with and without speculation, and where texts diverge.

And whether rounding in the dtype explains that.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Self

import torch
from torch import Tensor

from specgen.checkpoints.fingerprint import fingerprint
from specgen.config import EngineConfig, SamplingParams, require
from specgen.core.sequence import Completion, Request
from specgen.decoding.sampling import decisive_logits
from specgen.engine.arms import DECODING, Arm
from specgen.engine.build import prefill_logits
from specgen.engine.choices import resolve
from specgen.engine.conversations import first_turns, greedy
from specgen.engine.generation_config import FILE, generation_config
from specgen.engine.loading import Models, load_models, open_checkpoints
from specgen.engine.warm_engine import Run, WarmEngine
from specgen.prompts.load import RAW, DataSource
from specgen.record.progress import Progress
from specgen.record.provenance import manifest
from specgen.report.acceptance import Acceptance

# How far rounding may move the difference of two logits. Over 1,650 positions of the bundled pair's texts, computed in
# passes of 1 row, 5 rows and all rows, it moved by at most 4 steps of bfloat16 or float16 at the largest logit and, as
# every GEMM accumulates in float32, by at most 25 steps of float32. Doubled to allow for deeper models.
_STEPS = 8
_FLOAT32_STEPS = 48
# A key or value that rounding moves across the middle between two numbers of FP8 is stored as the other one, of which
# the steps are 16 times as far apart as bfloat16's. Over 1,336 such positions with an FP8 KV cache in float32, where
# nothing else is of that size, it moved differences of logits by at most 2.9 steps of bfloat16.
_FP8_KV_STEPS = 8
# Where inputs of GEMMs are rounded to FP8, one that lies between two of its values goes to the other, all behind it
# change, and with them many more: in any dtype the difference of two of the four largest logits moved by up to 0.13 of
# the largest over 1,260 positions of the bundled pair in FP8 (median 0.01), about one step of e4m3.
_FP8_STEPS = 2
_PLAIN = SamplingParams()


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first position where a text differs from the reference's. A token is None if that text has ended.

    Logits are the target's after the common prefix, with the biases and penalties of the request. ``gap`` is the
    largest logit minus the smaller one of the two tokens: greedy decoding may choose either token only if it is within
    ``rounding``.
    """

    request: str
    position: int  # in the answer, from 0
    reference_token: int | None
    token: int | None
    reference_text: str  # of the token alone
    text: str
    reference_logit: float | None
    logit: float | None
    gap: float | None
    rounding: float

    @property
    def explained(self) -> bool:
        """Whether rounding explains it; it never explains a text that ends early."""
        return self.gap is not None and self.gap <= self.rounding


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Judges divergences by the target's next-token logits ``[V]`` after any tokens, and its number formats."""

    logits_after: Callable[[Sequence[int]], Tensor]
    dtype: torch.dtype
    fp8: bool = False  # whether inputs of GEMMs are rounded to FP8
    token_text: Callable[[int], str]
    fp8_kv: bool = False  # keys and values are kept in FP8
    end_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: EngineConfig, models: Models) -> Self:
        """A judge of greedy texts of the target of a resolved ``config``."""
        return cls(
            logits_after=prefill_logits(config, models),
            dtype=models.target.dtype,
            fp8=models.target.config.fp8 is not None,
            token_text=lambda token: models.tokenizer.decode_with_special([token]),
            fp8_kv=config.kv_dtype == "fp8",
            end_tokens=models.target.config.eos_token_ids,
        )

    def first_divergence(
        self,
        request: str,
        prompt: Sequence[int],
        reference: Sequence[int],
        tokens: Sequence[int],
        sampling: SamplingParams = _PLAIN,
    ) -> Divergence | None:
        """The first position where the answer ``tokens`` diverges from ``reference``; None if they are equal.

        ``sampling`` is that of both.
        """
        at = first_difference(reference, tokens)
        if at is None:
            return None
        raw = self.logits_after([*prompt, *reference[:at]])
        logits = decisive_logits(raw, prompt, reference[:at], sampling, self.end_tokens)
        by = sampling.repetition_penalty  # also a factor of rounding
        left, right = (ids[at] if at < len(ids) else None for ids in (reference, tokens))
        return Divergence(
            request=request,
            position=at,
            reference_token=left,
            token=right,
            reference_text=self._text(left),
            text=self._text(right),
            reference_logit=None if left is None else float(logits[left]),
            logit=None if right is None else float(logits[right]),
            gap=None if left is None or right is None else gap(logits, left, right),
            rounding=max(by, 1 / by) * rounding(raw, self.dtype, fp8=self.fp8, fp8_kv=self.fp8_kv),
        )

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.token_text(token)


def first_difference(reference: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The first position where they differ, at most the shorter length; None if they are equal."""
    pairs = enumerate(zip_longest(reference, tokens))
    return next((at for at, (left, right) in pairs if left != right), None)


def gap(logits: Tensor, reference_token: int, token: int) -> float:
    """The largest of ``logits`` ``[V]`` minus the smaller one of the two tokens."""
    return float(logits.max() - torch.minimum(logits[reference_token], logits[token]))


def rounding(logits: Tensor, dtype: torch.dtype, *, fp8: bool = False, fp8_kv: bool = False) -> float:
    """The most that a pass of another shape may change the difference of two ``logits`` ``[V]`` in ``dtype``."""
    inputs = _FP8_STEPS * _step(logits, torch.float8_e4m3fn) if fp8 else 0.0
    stored = _FP8_KV_STEPS * _step(logits, torch.bfloat16) if fp8_kv else 0.0
    return inputs + stored + _STEPS * _step(logits, dtype) + _FLOAT32_STEPS * _step(logits, torch.float32)


def _step(logits: Tensor, dtype: torch.dtype) -> float:
    """The spacing of ``dtype`` at the largest absolute logit."""
    _, exponent = math.frexp(float(logits.abs().max()))
    return math.ldexp(torch.finfo(dtype).eps, exponent - 1)


# --- the audit ------------------------------------------------------------------------------------


def audit(
    engine: EngineConfig,
    given: SamplingParams,
    data: DataSource,
    batch_sizes: Sequence[int],
    progress: Progress,
) -> dict[str, Any]:
    """Decode the first turns in every arm and compare with plain decoding at the smallest batch size: the document.

    All arms share one set of weights. ``failures`` says which requests were not run and why. ``UserError`` if an arm,
    or every prompt, cannot run.
    """
    require(
        engine.draft_length.most > 0,
        "num-spec-tokens is 0, which leaves no speculation to verify: use 1 to 16",
    )
    assert given.temperature == 0, "only greedy texts can be compared"
    checkpoints = open_checkpoints(engine)
    config = resolve(engine, checkpoints)
    opened = data.open()
    prompts = list(opened)
    for sentence in opened.notes.sentences():
        progress.warn(sentence)
    generation = generation_config(checkpoints["model"], config.generation_config)
    said, sampling = generation.sentence(), generation.over(given)
    if said:
        progress.note(f"{FILE}: {said}")
    models = load_models(config, checkpoints)
    asked, failures = first_turns(prompts, models.tokenizer, sampling)
    if models.tokenizer.chat_template and opened.are_raw(prompts):
        progress.warn(RAW)
    requests, notes = greedy(asked)
    for sentence in notes:
        progress.warn(sentence)
    # n-grams have no drafter batch
    decodings = [each for each in DECODING if config.lookup is None or each != "non-padded"]
    first, *others = _arms(decodings, distinct(batch_sizes, len(requests)))
    decode = partial(_decode, config=config, models=models, requests=requests, progress=progress)
    reference, target = decode(first).completions, Judge.of(config, models)
    failures += [f"{c.request.id}: {c.error}" for c in reference.values() if c.error]
    answered = {name: completion for name, completion in reference.items() if completion.error is None}
    require(
        bool(answered),
        f"none of the prompts of {data.dataset} can be run: {(failures or ['no prompt'])[0]}",
    )
    arms = [_compare(arm, decode(arm), answered, target) for arm in others]
    for arm, found in zip(others, arms, strict=True):
        if arm.changes["decoding"] != "plain" and found["mean_acceptance_length"] is None:
            progress.warn(f"{arm.name}: no step had drafts, so its texts tell nothing of speculation")
    divergences = [each for arm in arms for each in arm["divergences"]]
    record = manifest(
        engine=config,
        sampling=sampling,
        data=data.to_json(),
        fingerprints={name: fingerprint(checkpoint) for name, checkpoint in checkpoints.items()},
    )
    return {
        "reference": _arm_json(first),
        "dtype": config.formats,
        "num_unexplained": sum(not each["explained"] for each in divergences),
        "num_empty": sum(not models.tokenizer.decode(each.token_ids).strip() for each in answered.values()),
        "arms": arms,
        "failures": failures,
        "manifest": record | ({"settings": {"generation config": said}} if said else {}),
    }


def distinct(batch_sizes: Sequence[int], num_requests: int) -> list[int]:
    """The ``batch_sizes`` that run differently: of several that hold all requests only the smallest."""
    sizes = sorted(set(batch_sizes))
    return [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] < num_requests]


def _arms(decodings: Sequence[str], batch_sizes: Sequence[int]) -> list[Arm]:
    """The arms: plain decoding at the smallest batch size first."""
    return [
        Arm(
            name=f"{decoding}, batch {size}",
            # without the prefix cache, so that the reference does not share a bug of it
            changes={"decoding": decoding, "batch": size}
            | ({"prefix_cache": False} if decoding == "plain" else {}),
        )
        for decoding in decodings
        for size in batch_sizes
    ]


def _arm_json(arm: Arm) -> dict[str, Any]:
    return {"name": arm.changes["decoding"], "batch_size": arm.changes["batch"]}


def _decode(
    arm: Arm, config: EngineConfig, models: Models, requests: Sequence[Request], progress: Progress
) -> Run:
    if config.device != "cpu":
        progress.prepare(arm.name)
    engine = WarmEngine(arm.configure(config), models, requests)
    progress.start(arm.name, len(requests))
    run = engine.run(progress.update, lambda _: progress.advance())
    progress.finish()
    return run


def _compare(arm: Arm, run: Run, reference: Mapping[str, Completion], target: Judge) -> dict[str, Any]:
    """The texts of ``arm`` against the reference's."""
    found = [
        target.first_divergence(
            name,
            ours.request.prompt_token_ids,
            ours.token_ids,
            run.completions[name].token_ids,
            ours.request.sampling,
        )
        for name, ours in reference.items()
    ]
    num_identical = found.count(None)
    return {
        **_arm_json(arm),
        "num_requests": len(found),
        "num_identical": num_identical,
        "identical": num_identical / len(found),
        "mean_acceptance_length": Acceptance(run.columns).mean_length,  # None without drafts
        "divergences": [asdict(each) | {"explained": each.explained} for each in found if each is not None],
    }
