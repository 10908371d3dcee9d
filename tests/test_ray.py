"""A run on two Ray workers, of which one is killed, or the driver and then a node, is the run of one process."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specgen import config
from specgen.config import Cluster, EngineConfig, SamplingParams, UserError
from specgen.config.errors import DeviceLost
from specgen.engine.conversations import RequestOutput
from specgen.engine.engine import Engine
from specgen.jobs import ray_engine
from specgen.jobs.job import Job
from specgen.jobs.ray_engine import RayEngine
from specgen.jobs.run import run
from specgen.prompts import Message, Prompt, Rejected
from specgen.prompts.load import DataSource
from specgen.record.record_rows import EngineRow, PassRow
from tests.commands import printed, refused
from tests.engines import resolved
from tests.jobs import Silent, files
from tests.waiting import LIMIT, wait_until

NUM_PROMPTS, MAX_TOKENS = 72, 24

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),  # at its own fields
    pytest.mark.xdist_group("ray"),  # no two clusters at once
]


@pytest.fixture(scope="module")
def pair(demo_path: Path) -> EngineConfig:
    target, head = str(demo_path / "target"), str(demo_path / "drafter")
    return resolved(EngineConfig(model=target, drafter=head, max_batch_size=2, device="cpu"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every other row is sampled, and one is broken."""
    path = tmp_path_factory.mktemp("ray") / "prompts.jsonl"
    with path.open("w") as file:
        for n in range(NUM_PROMPTS):
            chat = [{"role": "user", "content": f"Tom has {n} apples and buys {2 * n} more."}]
            row = {"id": f"q{n}", "messages": chat, "temperature": 0.8 * (n % 2)}
            file.write("{broken\n" * (n == 9) + json.dumps(row) + "\n")
    return path


class Driver:
    """``specgen generate --executor ray`` in a process of its own."""

    def __init__(self, data: Path, out: Path, *more: str) -> None:
        self.completions = out / "completions.jsonl"
        command = [sys.executable, "-m", "specgen", "generate", "--device", "cpu"]
        options = {"dataset": data, "output": out, "max-new-tokens": MAX_TOKENS, "max-batch-size": 2}
        ray = {"executor": "ray", "num-workers": 2}
        flags = [str(part) for name, value in (options | ray).items() for part in (f"--{name}", value)]
        self.log = out.with_suffix(".log").open("w")
        self.process = subprocess.Popen(
            [*command, *flags, *more],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # as in this process
        )

    def wait_for(self, found: Callable[[], Any]) -> Any:
        """What is ``found`` at last."""

        def it() -> Any:
            there = found()
            assert there or self.process.poll() is None, Path(self.log.name).read_text()
            return there

        return wait_until(it)

    @property
    def num_done(self) -> int:
        return self.completions.read_bytes().count(b"\n") if self.completions.exists() else 0


def workers_below(pid: int) -> list[int]:
    """The processes with engines."""
    names = {each: Path(f"/proc/{each}/cmdline") for each in _below(pid)}
    return [each for each, name in names.items() if name.exists() and b"_Worker" in name.read_bytes()]


def _below(pid: int) -> Iterator[int]:
    """All children, and theirs."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if parent == pid:
            yield int(stat.parent.name)
            yield from _below(int(stat.parent.name))


@pytest.fixture(scope="module")
def whole(pair: EngineConfig, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files of a run without Ray."""
    job = Job(
        engine=replace(pair, attention="auto"),
        sampling=SamplingParams(max_tokens=MAX_TOKENS),
        data=DataSource(dataset=str(data)),
        baseline=False,
    )
    path = tmp_path_factory.mktemp("whole") / "run"
    run(job, path, Silent())
    return files(path)


@pytest.mark.slow
def test_a_worker_may_be_killed_by_ray(
    pair: EngineConfig, data: Path, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an operator does, or Ray itself where memory runs out."""
    import ray

    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")
    pools = list[Any]()
    add = ray_engine._Pool._add
    monkeypatch.setattr(ray_engine._Pool, "_add", lambda self: (pools.append(self), add(self)))

    class Killing(Silent):
        num_done = 0

        def advance(self) -> None:
            self.num_done += 1
            if self.num_done == 1:
                ray.kill(next(iter(pools[0]._num_blocks)))

    job = Job(
        engine=replace(pair, attention="auto"),
        sampling=SamplingParams(max_tokens=MAX_TOKENS),
        data=DataSource(dataset=str(data)),
        cluster=Cluster(num_workers=2),
    )
    run(job, tmp_path / "ray", Killing())
    assert len(pools) == 3, "another took its place"
    on_ray = files(tmp_path / "ray")
    assert on_ray["manifest.json"]["settings"].pop("workers") == "2 on Ray, at once"
    assert on_ray == whole


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster of two nodes, each a tree of processes with room for one worker of two ranks."""
    from ray.cluster_utils import Cluster as Nodes

    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")
    size = {"num_cpus": 2, "object_store_memory": 80 << 20}
    nodes = Nodes(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    nodes.add_node(**size)
    yield nodes
    nodes.shutdown()


@pytest.mark.slow
def test_the_driver_and_a_node_of_a_cluster_may_be_lost(
    data: Path, whole: dict[str, Any], nodes: Any, tmp_path: Path
) -> None:
    """There is no room for another worker: the one that is left answers what the other had, whose ranks end with it."""
    several = ("--address", nodes.address, "--tensor-parallel", "2")
    driver = Driver(data, tmp_path / "ray", *several)
    driver.wait_for(lambda: driver.num_done)
    os.kill(driver.process.pid, signal.SIGKILL)
    driver.process.wait()
    done = driver.num_done
    head, other = (node.all_processes["raylet"][0].process.pid for node in nodes.list_all_nodes())
    wait_until(lambda: not [*workers_below(head), *workers_below(other)])
    driver = Driver(data, tmp_path / "ray", *several)
    driver.wait_for(lambda: driver.num_done > done and workers_below(head) and workers_below(other))
    assert driver.num_done < NUM_PROMPTS
    lost = [*_below(other)]
    ranks = [pid for pid in lost if b"engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in {other, *lost} - {*ranks}:
        os.kill(pid, signal.SIGKILL)
    stdout, _ = driver.process.communicate(timeout=LIMIT)
    assert driver.process.returncode == 3, "the broken row"
    assert stdout.startswith("Prompt:"), "what Ray has to say is not on stdout"
    assert len(ranks) == 1
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    found = files(tmp_path / "ray")
    assert found["manifest.json"]["settings"]["workers"] == "2 on Ray, at once"
    for name in ("completions.jsonl", "errors.jsonl"):
        assert found[name] == whole[name]


class InProcess(RayEngine):
    """Blocks are answered here, several at once, by two workers without Ray."""

    def _answered(self, blocks: Any, sampling: SamplingParams, lost: Any, until: Any) -> Iterator[Any]:
        workers = [
            ray_engine._Worker(self.config, sampling, sampling, lost, time.time() - 100) for _ in range(2)
        ]
        yield from [worker.start() for worker in workers]
        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(workers[n % 2].answer, block) for n, block in enumerate(blocks)]
            for call in as_completed(calls):
                yield pickle.loads(pickle.dumps(call.result()))


def answers(
    engine: RayEngine, prompts: list[Any], max_tokens: int = 16, **earlier: str
) -> Iterator[RequestOutput]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return engine.generate(prompts, sampling, earlier=earlier, lost={}, until=lambda: False)


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no cluster to connect with."""
    monkeypatch.setattr(ray_engine, "_connected", lambda cluster: nullcontext())


@pytest.mark.usefixtures("unconnected")
def test_blocks_give_the_output_of_one_engine(pair: EngineConfig) -> None:
    """Conversations too, also those that an earlier run has answered in part; passes come once, before their output."""
    chats = [[Message(role="user", content=f"Tom has {n} apples.")] for n in range(9)]
    prompts: list[Prompt | Rejected] = [
        Prompt(id=str(n), messages=tuple(chat), follow_ups=("And now?",)) for n, chat in enumerate(chats)
    ]
    prompts[5:5] = [Rejected(id="line 6", reason="line 6: broken")]
    sampling, passes = SamplingParams(max_tokens=8), list[PassRow]()

    def record(row: EngineRow) -> None:
        assert row.time > 100, "the run began before the worker"
        assert isinstance(row, PassRow)
        passes.append(row)

    whole = {output.id: output for output in Engine(pair).generate(prompts, sampling)}
    earlier = {name: whole[name].text for name in ("0", "1", "1/turn-2", "8")}
    blocks = InProcess(config=pair, cluster=Cluster(num_workers=2), record=record)
    outputs = answers(blocks, prompts, 8, **earlier)
    seen = []
    for output in outputs:
        seen.append(output.id)
        assert output == whole[output.id]
        if output.record is not None:
            assert output.record.arrival > 100
            steps = [passes[step.number] for step in output.record.steps or ()]
            assert all(row.kind == "decode" for row in steps)
            times = [output.record.first_token, *(row.time for row in steps)]
            assert times == sorted(times)
            assert output.record.ended >= times[-1]
            assert output.record.first_token in {row.time for row in passes}, "its passes came before"
    assert sorted(seen) == sorted(whole.keys() - earlier.keys())
    assert [row.number for row in passes] == list(range(len(passes))), "of all blocks"
    assert len({row.time for row in passes}) == len(passes)
    assert max(row.num_sequences for row in passes) == 2


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("skew", [-300.0, 0.5, 300.0])
def test_a_clock_that_is_not_this_machines_moves_no_time(
    pair: EngineConfig, caplog: pytest.LogCaptureFixture, skew: float
) -> None:
    """Only so far as it cannot be told from the way of an answer."""
    events = list[Any]()

    class Skewed(InProcess):
        def _answered(self, *asked: Any) -> Iterator[Any]:
            for answer in super()._answered(*asked):
                found = [ray_engine._moved(each, skew) for each in answer.records]
                yield replace(answer, records=found, time=answer.time + skew)

    cluster, ready = Cluster(num_workers=2), lambda: events.append("ready")
    engine = Skewed(config=pair, cluster=cluster, record=events.append, ready=ready)
    outputs = answers(engine, [Prompt(id=str(n), text="Tom has") for n in range(3)], 2)
    arrivals = [output.record.arrival for output in outputs if output.record]
    assert len(arrivals) == 3
    assert events[0] == "ready", "before the first pass"
    assert events.count("ready") == 1
    assert all(100 < time < 160 for time in (*arrivals, *(row.time for row in events[1:])))
    said = [record.getMessage() for record in caplog.records]
    way = "behind" if skew < 0 else "ahead of"
    assert len(said) == (0 if abs(skew) < 1 else 2)
    clock = rf"the clock of a worker's machine is (29\d|30\d) s {way} this one's"  # an answer has a way too
    assert all(re.match(clock, line) for line in said)


@pytest.mark.usefixtures("unconnected")
def test_an_error_in_a_worker_is_raised_by_the_driver(
    pair: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its type and fields, after what the worker did before; one at its start with the traceback of there."""
    starting = replace(pair, kv_memory=1)
    blocks = InProcess(config=starting, cluster=Cluster(num_workers=1), record=lambda event: None)
    with pytest.raises(UserError, match="1 bytes are left for the KV cache") as failed:
        next(answers(blocks, [Prompt(id="a", text="Tom has 2 apples.")]))
    (note,) = failed.value.__notes__
    assert "in num_pages" in note
    generate = Engine.generate

    def lose_the_device(*arguments: Any, **named: Any) -> Iterator[RequestOutput]:
        yield next(generate(*arguments, **named))
        raise DeviceLost("no answer", ("b",))

    monkeypatch.setattr(Engine, "generate", lose_the_device)
    blocks = InProcess(config=pair, cluster=Cluster(num_workers=1), record=lambda event: None)
    prompts = [Prompt(id="a", text="Tom has 2 apples."), Prompt(id="b", text="Tom has 3 apples.")]
    outputs = answers(blocks, prompts, 1)
    assert next(outputs).id in ("a", "b")
    with pytest.raises(DeviceLost) as lost:
        next(outputs)
    assert (lost.value.reason, lost.value.requests) == ("no answer", ("b",))


@pytest.mark.parametrize(
    ("num_prompts", "sizes"), [(0, []), (1, [1]), (2, [1, 1]), (5, [3, 2]), (8, [4, 4]), (11, [4, 4, 2, 1])]
)
def test_blocks_are_full_and_the_last_ones_equal(num_prompts: int, sizes: list[int]) -> None:
    prompts = iter([Prompt(id=str(n), text="x") for n in range(num_prompts)])
    blocks = list(ray_engine._blocks(prompts, {"3": "three", "9": "nine"}, 4, 2, SamplingParams()))
    assert [len(block.prompts) for block in blocks] == sizes
    assert [prompt.id for block in blocks for prompt in block.prompts] == [str(n) for n in range(num_prompts)]
    for block in blocks:
        assert block.earlier.keys() == {"3", "9"} & {prompt.id for prompt in block.prompts}


class FakeWorker:
    """As Ray's handle of a worker, which ``lost_with`` takes, with all that it has not answered yet."""

    def __init__(self, lost_with: Counter[str]) -> None:
        self.lost_with, self.is_lost = lost_with, False
        self.start = SimpleNamespace(remote=lambda: (self, ()))
        self.answer = SimpleNamespace(remote=lambda block: (self, tuple(each.id for each in block.prompts)))


def pool_of(monkeypatch: pytest.MonkeyPatch, lost_with: Counter[str]) -> tuple[Any, list[FakeWorker]]:
    """Two such workers, which take as many others as ``lost_with`` says for a prompt; and all that were started."""
    import ray

    def get(answer: Any) -> Any:
        worker, names = answer
        worker.is_lost = worker.is_lost or any(lost_with[name] > 0 for name in names)
        lost_with.subtract(names)
        if worker.is_lost:
            raise ray.exceptions.ActorDiedError
        return names

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda answers, timeout: (answers[:1], answers[1:]))
    started: list[FakeWorker] = []

    def new() -> FakeWorker:
        started.append(FakeWorker(lost_with))
        return started[-1]

    return ray_engine._Pool(new, 2), started


def blocks_of(names: str) -> Iterator[Any]:
    return (ray_engine._Block(prompts=[Prompt(id=name, text="x")], earlier={}) for name in names)


def test_the_blocks_of_a_lost_worker_are_answered_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, started = pool_of(monkeypatch, Counter("ci"))
    answers = [name for answer in pool.answers(blocks_of("abcdefghij"), lambda: False) for name in answer]
    assert sorted(answers) == list("abcdefghij")
    assert len(started) == 4


def test_what_takes_every_worker_is_given_up_behind_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, started = pool_of(monkeypatch, Counter(c=1000))
    answers = pool.answers(blocks_of("abcdefghij"), lambda: False)
    found = list[str]()
    with refused("workers were lost 7 times without an answer in between: The actor died"):
        found.extend(chain.from_iterable(answers))
    assert sorted(found) == list("abdefghij")
    assert len(started) < 20


def test_waiting_for_an_answer_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    pool, _ = pool_of(monkeypatch, Counter())
    monkeypatch.setattr(ray, "wait", lambda answers, timeout: ([], answers))
    asked = count()
    assert not list(pool.answers(blocks_of("ab"), lambda: next(asked) > 2))


def test_stdout_belongs_to_the_consumer_of_the_outputs(
    pair: EngineConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    def answered(self: RayEngine, *arguments: Any) -> Iterator[Any]:
        print("Ray works")
        outputs = [RequestOutput(id=name, finish_reason="stop") for name in "ab"]
        yield ray_engine._Answer(worker="w", records=[*outputs], time=time.time())

    monkeypatch.setattr(ray_engine, "_start", lambda cluster: print("Ray starts"))
    monkeypatch.setattr(ray, "shutdown", lambda: print("Ray ends"))
    monkeypatch.setattr(RayEngine, "_answered", answered)
    engine = RayEngine(config=pair, cluster=Cluster(num_workers=1), record=lambda event: None)
    for output in answers(engine, []):
        print(output.id)
    assert capsys.readouterr() == ("a\nb\n", "Ray starts\nRay works\nRay ends\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-workers", "2"], "add --executor ray"),
        (["--address", "auto"], "add --executor ray"),
        (["--executor", "ray", "--num-workers", "0"], "num-workers is 0: use at least 1"),
        (["--executor", "ray", "--address", "127.0.0.1:1"], "no Ray cluster at address '127.0.0.1:1': "),
    ],
)
def test_invalid_clusters_are_refused(arguments: list[str], words: str) -> None:
    with refused(words):
        printed("generate", "--device", "cpu", *arguments)


def test_a_missing_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    with refused(r"^executor is ray, which is not installed: pip install '\.\[ray\]'$"):
        printed("generate", "--executor", "ray")


def test_every_worker_needs_a_gpu_of_its_own(pair: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    on_gpu = replace(pair, device="cuda")
    RayEngine(config=on_gpu, cluster=Cluster(num_workers=1), record=lambda event: None)
    with refused("num-workers is 2 and this machine has 1 GPUs"):
        RayEngine(config=on_gpu, cluster=Cluster(num_workers=2), record=lambda event: None)
    several = replace(on_gpu, tensor_parallel=2)
    with refused("num-workers is 1 and this machine has 1 GPUs: use 2 for each"):
        RayEngine(config=several, cluster=Cluster(num_workers=1), record=lambda event: None)


@pytest.mark.parametrize(
    ("device", "address", "num_ranks", "resources"),
    [
        ("cuda:0", None, 1, {"num_gpus": 1}),
        ("cuda:0", "a:1", 4, {"num_gpus": 4}),
        ("cpu", "a:1", 1, {"num_cpus": 1}),
        ("cpu", "a:1", 2, {"num_cpus": 2}),
    ],
)
def test_a_worker_gets_what_its_ranks_need(
    pair: EngineConfig, device: str, address: str | None, num_ranks: int, resources: dict[str, int]
) -> None:
    asked = replace(pair, device=device, tensor_parallel=num_ranks)
    assert ray_engine._resources(Cluster(num_workers=2, address=address), asked) == resources
