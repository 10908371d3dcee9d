"""Mutation testing of the code that decides texts and numbers: one change at a time, run against its tests.

    python scripts/mutants.py --num-mutants 150 --seed 0 --output mutants.jsonl

Each row of the output is one mutant and its outcome, written when known; the same command resumes a stopped run.
Survivors are listed at the end: each is a missing test, or an equivalent mutant.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from mutant_tests import ROOT, Result, Trial, preload, run_trials
from mutations import Mutation, mutations

_TABLE: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)


def _tests(names: Iterable[str]) -> tuple[str, ...]:
    """Each of ``names`` that is a group is replaced by its tests."""
    groups = _TABLE["groups"]
    return tuple(test for name in names for test in (_tests(groups[name]) if name in groups else (name,)))


TESTS = {
    module: _tests(names) for module, names in _TABLE["modules"].items()
}  # of every module, see the table
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


@cache
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
