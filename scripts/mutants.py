"""Mutation testing of the code that decides texts and numbers: one change at a time, run against its tests.

    python scripts/mutants.py --num-mutants 150 --seed 0 --output mutants.jsonl

Each row of the output is one mutant and its outcome, written when known; the same command resumes a stopped run.
Survivors are listed at the end: each is a missing test, or an equivalent mutant.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from mutant_tests import ROOT, Result, Trial, preload, run_trials
from mutations import Mutation, mutations

_TEXTS = (  # a few tests that run all of decoding
    "test_engine.py",
    "test_drafting.py",
    "test_lossless.py::test_greedy_text_with_mixed_acceptance[3]",
    "test_lossless.py::test_max_tokens_is_exact",
    "test_lossless.py::test_eos_inside_accepted_drafts_ends_the_text",
    "test_lossless.py::test_a_text_ends_at_the_context_limit",
)
_MIXTURES = ("test_mixtures.py", "test_mixture_files.py", "test_published_mixtures.py")
_LATENTS = ("test_latents.py", "test_latent_commands.py", "test_published_latents.py", "test_mtp.py")
_FP8 = ("test_fp8.py", "test_fp8_files.py", "test_fp8_weights.py", "test_fp8_experts.py")
_HEADS = "test_heads.py::test_every_draft_equals_the_reference_and_no_text_changes"
_LOOKAHEAD = (  # lookahead, padding rows, packed drafter rows, and too few pages
    "test_pipeline.py::test_lookahead_changes_no_text_and_no_step[6-4-padded-sampled]",
    "test_pipeline.py::test_preemption_with_lookahead[non-padded]",
    "test_pipeline.py::test_no_page_leaks_and_page_0_holds_padding_rows",
    "test_pipeline.py::test_no_step_is_spent_on_a_text_that_reaches_its_length[True]",
    "test_pipeline.py::test_no_step_is_spent_on_a_text_that_its_first_token_ended",
)
_SAMPLING = (
    "test_sampling.py::test_random_numbers_equal_splitmix64",
    "test_sampling.py::test_uniform_numbers_are_uniform_and_differ_by_purpose",
    "test_sampling.py::test_zero_probability_tokens_are_never_sampled",
    "test_sampling.py::test_filtered_probabilities",
    "test_sampling.py::test_draft_probabilities_of_greedy_and_nan_rows_are_one_hot",
    "test_sampling.py::test_gpu_filters_equal_the_reference",
    "test_sampling.py::test_temperature_0_in_a_sampled_batch_is_greedy",
    "test_sampling.py::test_a_seed_gives_the_same_text_in_any_batch",
    "test_sampling.py::test_every_position_has_the_distribution_of_plain_sampling[all-probabilistic]",
    "test_sampling.py::test_every_position_has_the_distribution_of_plain_sampling[biased-greedy]",
)
_PER_REQUEST = (
    "test_per_request.py::test_logprobs_of_one_row",
    "test_per_request.py::test_unused_features_cost_nothing",
    "test_per_request.py::test_logprobs_end_with_the_text",
    "test_per_request.py::test_logprobs_equal_the_reference[4-padded-False-biased]",
    "test_per_request.py::test_biased_greedy_text_equals_biased_plain_decoding[4-non-padded-True]",
    "test_per_request.py::test_each_request_gets_the_same_output_in_a_batch_as_alone[4-True]",
)
_PREFIX_CACHE = (
    "test_prefix_cache.py::test_a_page_digest_covers_all_tokens_up_to_the_one_after_the_page",
    "test_prefix_cache.py::test_page_sharing_and_eviction_equal_a_simple_model",
    "test_prefix_cache.py::test_eviction_is_lru_and_from_the_end_of_a_text",
    "test_prefix_cache.py::test_the_next_turn_reuses_the_pages_of_the_answer",
    "test_prefix_cache.py::test_the_prefix_cache_changes_no_text_draft_or_acceptance[33-sampling0-3-padded]",
    "test_prefix_cache.py::test_pages_of_preempted_and_finished_texts_are_reused",
    "test_prefix_cache.py::test_scoring_shares_context_pages_and_changes_no_text",
    "test_prefix_cache.py::test_pages_of_a_failed_pass_are_not_shared",
)
_OUT_OF_MEMORY = (
    "test_pipeline.py::test_out_of_memory_lowers_the_limits_and_changes_no_text",
    "test_pipeline.py::test_a_request_too_large_for_memory_fails_alone",
    "test_pipeline.py::test_out_of_memory_at_the_last_step",
)
_FAILURES = (
    "test_failures.py::test_nan_logits_fail_only_their_request[4-greedy-padded-True]",
    "test_failures.py::test_a_retried_request_gives_the_right_text[padded-True-5]",
    "test_failures.py::test_a_retried_request_gives_the_right_text[non-padded-False-1]",
    "test_failures.py::test_pages_of_a_failed_sequence_are_not_shared",
    "test_failures.py::test_a_device_error_changes_no_text[prefill-2-False]",
    "test_failures.py::test_a_device_error_changes_no_text[decode-6-True]",
    "test_failures.py::test_a_request_that_breaks_every_pass_fails_alone",
    "test_failures.py::test_a_device_that_always_fails_fails_all_requests_and_ends_the_run",
    "test_failures.py::test_an_error_at_start_up_fails_no_request",
    "test_failures.py::test_a_device_lost_at_start_up_fails_no_request",
    "test_failures.py::test_a_lost_device_ends_the_run_and_names_the_requests_in_flight",
    "test_failures.py::test_a_request_retried_alone_is_the_only_one_in_flight",
)
_FAULTS = (
    "test_faults.py::test_an_error_at_any_launch_changes_no_result[greedy-K4-cache-lookahead-OutOfMemoryError]",
    "test_faults.py::test_an_error_at_any_launch_changes_no_result[sampled-K4-cache-sync-RuntimeError]",
    "test_faults.py::test_limits_recover_after_an_error",
    "test_faults.py::test_an_error_and_a_closed_iterator[greedy-K4-cache-lookahead-RuntimeError]",
)
_ENGINE_LOOP = (*_TEXTS, *_LOOKAHEAD, *_OUT_OF_MEMORY, *_FAULTS, *_FAILURES)
_RUNS = (
    "test_run.py::test_a_run_leaves_its_files_and_its_numbers_agree",
    "test_run.py::test_the_second_turn_sees_the_first_answer",
    "test_run.py::test_a_bad_row_is_a_record_and_the_rest_runs",
    "test_run.py::test_a_stop_string_ends_the_text",
    "test_run.py::test_rows_alone_go_to_stdout",
    "test_run.py::test_bad_input_is_one_line",
    "test_run.py::test_a_run_that_failed_at_the_start_leaves_nothing_in_the_way",
    "test_run.py::test_an_old_run_is_never_overwritten",
    "test_going_on.py",
)
_SCORES = (
    "test_scoring.py",
    "test_prefix_cache.py::test_scoring_shares_context_pages_and_changes_no_text",
    "test_faults.py::test_an_error_while_scoring_changes_no_logprob",
)
_REPORTS = ("test_report.py", "test_resume.py", "test_unfinished.py")
# The tests of every module, as pytest arguments below tests/, the fastest to find a bug first. Tests that start other
# processes find nothing: those import the unchanged specgen.
TESTS: dict[str, tuple[str, ...]] = {
    "decoding/verify": (
        "test_engine.py",
        *_SAMPLING,
        "test_lossless.py::test_greedy_text_with_mixed_acceptance[3]",
    ),
    "decoding/sampling": ("test_engine.py", *_SAMPLING, *_PER_REQUEST),
    "decoding/drafting": (*_TEXTS, "test_drafting.py", _HEADS, *_SAMPLING, *_LOOKAHEAD),
    "decoding/outcome": (*_TEXTS, *_SAMPLING, *_LOOKAHEAD),
    "core/step": (*_TEXTS, "test_scoring.py", *_SAMPLING, *_PER_REQUEST, *_FAILURES),
    "core/running_batch": (*_TEXTS, *_PER_REQUEST, *_LOOKAHEAD, *_FAULTS),
    "core/scheduler": ("test_scheduler.py", "test_limits.py", *_TEXTS, *_PREFIX_CACHE, *_LOOKAHEAD, *_FAULTS),
    "core/sequence": ("test_scheduler.py", *_TEXTS, *_PER_REQUEST, *_LOOKAHEAD),
    "core/engine_core": (
        *_ENGINE_LOOP,
        "test_engine.py",
        *_PER_REQUEST,
        "test_per_request.py::test_a_prompt_outside_the_vocabulary_is_refused",
        "test_run.py::test_a_bad_row_is_a_record_and_the_rest_runs",
        "test_per_request.py::test_a_bias_outside_the_vocabulary_refuses_the_request",
        *_SCORES,
    ),
    "core/passes": (*_ENGINE_LOOP, *_SCORES),
    "core/packing": (*_TEXTS, "test_lossless.py::test_chunked_prefill_changes_no_text"),
    "kv/layout": ("test_layout.py", "test_attention.py", *_TEXTS, *_LOOKAHEAD),
    "kv/pages": ("test_scheduler.py", *_PREFIX_CACHE, *_TEXTS, *_LOOKAHEAD, "test_engine.py", *_FAULTS),
    "kv/kv_cache": ("test_attention.py", "test_engine.py", *_FAILURES),
    "attention/sdpa": (
        "test_attention.py",
        "test_attention_windows.py",
        "test_attention_sinks.py",
        "test_fp8_attention.py",
    ),
    "attention/planning": ("test_attention_plans.py", "test_attention_windows.py"),
    "core/spec_length": ("test_spec_length.py", "test_step_costs.py"),
    "report/acceptance": _REPORTS,
    "report/intervals": ("test_intervals.py", "test_paired.py", "test_report.py"),
    "report/report": (*_REPORTS, "test_tables.py", "test_shards.py"),
    "report/timings": ("test_timings.py", *_REPORTS),
    "record/record_rows": _REPORTS,
    "record/counts": _REPORTS,
    "rundir/row_file": ("test_resume.py", "test_going_on.py"),
    "rundir/results": ("test_resume.py", *_RUNS),
    "jobs/merge": ("test_shards.py",),
    "models/eagle": ("test_models.py", "test_checkpoint.py", "test_inspect.py", "test_drafting.py", _HEADS),
    "models/llama": ("test_models.py", "test_checkpoint.py", "test_rank_shares.py"),
    "models/layers": ("test_models.py", "test_checkpoint.py", "test_fp8_kv.py", *_MIXTURES, *_LATENTS),
    "models/mixture_targets": (*_MIXTURES, *_LATENTS),
    "attention/__init__": (*_LATENTS, "test_attention_windows.py", "test_fp8_attention.py", "test_fp8_kv.py"),
    "models/mtp": _LATENTS,
    "attention/latent_decode": (
        "test_latent_decode.py",
        "test_jit_modules.py",
        "test_attention_plans.py",
        *_LATENTS,
    ),
    "models/rotary": ("test_models.py", "test_mixtures.py"),
    "ops/experts": (*_MIXTURES, *_LATENTS),
    "ops/fp8": _FP8,
    "models/fp8_config": (*_FP8, "test_rank_shares.py", "test_fp8_kv.py"),
    "checkpoints/rank_share": ("test_rank_shares.py",),
    "ops/reference": ("test_rank_shares.py",),
    "checkpoints/tensor_reader": ("test_checkpoint.py", *_MIXTURES, *_FP8, "test_fp8_kv.py", _HEADS),
    "engine/conversations": ("test_engine.py", "test_lost.py", *_RUNS),
}
_SLACK = 20.0  # time limit of a trial in seconds, plus
_TIMES = 3.0  # times the duration of its tests on the unchanged code


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change of one module."""

    module: str
    mutation: Mutation
    source: str

    def to_json(self) -> dict[str, Any]:
        """Its identity in a results file, as long as its line is unchanged."""
        before, after = self.mutation.shown(self.source)
        where = {"module": self.module, "line": self.mutation.line, "operator": self.mutation.operator}
        return {**where, "before": before, "after": after}

    def trial(self, seconds: float) -> Trial:
        """Its tests, which may take ``seconds``."""
        return Trial(
            path=_path(self.module),
            source=self.mutation.apply(self.source),
            tests=_arguments([self.module]),
            seconds=seconds,
        )


def _path(module: str) -> Path:
    return ROOT / "specgen" / f"{module}.py"


def _arguments(modules: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"tests/{test}" for module in modules for test in TESTS[module]))


def sample(num_mutants: int, seed: int) -> list[Mutant]:
    """``num_mutants`` different mutants, from each module in proportion to its number of mutations."""
    every = {module: _mutants(module) for module in TESTS}
    total = sum(map(len, every.values()))
    num_mutants = min(num_mutants, total)
    shares = {module: num_mutants * len(mutants) / total for module, mutants in every.items()}
    counts = {module: int(share) for module, share in shares.items()}
    by_remainder = sorted(shares, key=lambda module: counts[module] - shares[module])
    for module in by_remainder[: num_mutants - sum(counts.values())]:
        counts[module] += 1
    chosen = {module: Random(f"{seed} {module}").sample(every[module], counts[module]) for module in every}
    return [mutant for mutants in chosen.values() for mutant in mutants]


def _mutants(module: str) -> list[Mutant]:
    source = _path(module).read_text(encoding="utf-8")
    return [Mutant(module=module, mutation=change, source=source) for change in mutations(source)]


def time_tests(modules: Iterable[str]) -> dict[str, float]:
    """Seconds that each module's tests take on the unchanged code, where they must pass."""
    modules = list(modules)
    trial = Trial(tests=_arguments(modules), seconds=3600.0)
    ((_, result),) = run_trials([trial], workers=1)
    if result.outcome != "survived":
        typer.echo(f"the tests fail on the unchanged code:\n{result.output[-4000:]}", err=True)
        raise typer.Exit(1)
    return {module: _seconds(_arguments([module]), result.durations) for module in modules}


def _seconds(tests: Iterable[str], durations: Mapping[str, float]) -> float:
    return sum(
        seconds
        for name, seconds in durations.items()
        if any(name == test or name.startswith((f"{test}::", f"{test}[")) for test in tests)
    )


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The fields that identify a mutant."""
    return tuple(row[name] for name in ("module", "line", "before", "after"))


def previous_rows(output: Path, *, again: bool) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows in ``output``, without the survivors if they are to run ``again``."""
    if not output.exists():
        return {}
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    return {key(row): row for row in rows if not (again and row["outcome"] == "survived")}


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """Number caught by module and by operator, and the survivors."""
    rows = list(rows)
    lines = []
    for name in ("module", "operator"):
        lines += ["", f"{name:24}{'caught':>8}{'of':>6}"]
        for label in dict.fromkeys(row[name] for row in rows):
            lines.append(_line(label, [row for row in rows if row[name] == label]))
        lines.append(_line("all", rows))
    survivors = [row for row in rows if row["outcome"] == "survived"]
    lines += ["", f"{len(survivors)} survived:"]
    for row in survivors:
        lines += [f"{row['module']}.py:{row['line']} ({row['operator']})"]
        lines += [f"  - {row['before']}", f"  + {row['after']}"]
    return "\n".join(lines[1:])


def _line(label: str, rows: list[Mapping[str, Any]]) -> str:
    caught = sum(row["outcome"] != "survived" for row in rows)
    return f"{label:24}{caught:8}{len(rows):6}  {caught / len(rows):4.0%}"


def main(
    output: Annotated[Path, typer.Option(help="JSONL, one row per mutant; mutants in it are not run again")],
    num_mutants: Annotated[int, typer.Option(min=1, help="number of mutants to sample")] = 150,
    seed: Annotated[int, typer.Option(help="random seed of the sample")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="mutants run in parallel")] = 1,
    again: Annotated[bool, typer.Option("--again", help="run survivors again")] = False,
) -> None:
    """Sample mutants of specgen and run their tests."""
    chosen = {key(mutant.to_json()): mutant for mutant in sample(num_mutants, seed)}
    rows = {name: row for name, row in previous_rows(output, again=again).items() if name in chosen}
    waiting = [mutant for name, mutant in chosen.items() if name not in rows]
    if waiting:
        preload()
        typer.echo(f"{len(waiting)} mutants to run; first their tests on the unchanged code")
        seconds = time_tests(dict.fromkeys(mutant.module for mutant in waiting))
        for module, each in seconds.items():
            typer.echo(f"  {module}: {each:.0f} s")
        trials = [mutant.trial(_SLACK + _TIMES * seconds[mutant.module]) for mutant in waiting]
        with output.open("a", encoding="utf-8") as file:
            for number, result in run_trials(trials, workers):
                row = {**waiting[number].to_json(), **_found(result)}
                rows[key(row)] = row
                file.write(json.dumps(row) + "\n")
                file.flush()
                where = f"{row['module']}:{row['line']}"
                typer.echo(f"{result.outcome:9}{result.seconds:5.0f} s  {where}  {row['after']}")
    typer.echo(summary(rows[name] for name in chosen))


def _found(result: Result) -> dict[str, Any]:
    return {"outcome": result.outcome, "test": result.test, "seconds": round(result.seconds, 1)}


if __name__ == "__main__":
    typer.run(main)
