"""Rank 0's side of tensor parallelism: the processes of the other ranks, and the calls that its engines send them.

A thread watches the processes, as rank 0 itself may be inside of a pass that cannot end without the one that is gone.
"""

import atexit
import faulthandler
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVarTuple

import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from specgen.config import EngineConfig, SamplingParams, UserError, first_line, require
from specgen.config.errors import DeviceLost
from specgen.core.graphs import Runner
from specgen.core.peers import Peers
from specgen.device import HostCopy, Ranks, RankUnreachable
from specgen.engine.rank_group import ENVIRONMENT, Alive, Checksum, Failed, Place, join

if TYPE_CHECKING:
    from specgen.core.engine_core import EngineCore
    from specgen.engine.worker import Worker

Ts = TypeVarTuple("Ts")
TIMEOUT = 900.0  # seconds for an answer, or for a pass: a first one may compile kernels for minutes
_GATHER = 2.0  # seconds to collect the reports of a failure
GRACE = 20.0  # seconds for rank 0 to come back from a pass that lost a rank
END = 10.0  # seconds for a process to end
_TICK = 0.5  # seconds between two looks at the clock
# Between two looks at whether a pass has ended: a share of the time waited, in seconds at least and at most. What is
# seen so much later costs nothing, as the device has the next pass by then; each look holds the interpreter up.
_PAUSE, _SHORTEST, _LONGEST = 1 / 16, 1e-4, 1e-3
_worker_groups: "weakref.WeakValueDictionary[tuple[str, int], WorkerGroup]" = weakref.WeakValueDictionary()


@dataclass(kw_only=True, eq=False)
class WorkerProcess:
    place: Place
    process: "subprocess.Popen[bytes]"
    connection: Connection
    stderr: IO[bytes]
    failure: Failed | None = None  # its last message, if it sent one before it ended

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def why(self) -> str:
        """Why it is gone; one that has said nothing may still be ending."""
        if self.failure is not None:
            return self.failure.reason
        try:
            code = self.process.wait(END)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return f"it ended with exit code {code}" + (f": {lines[-1]}" if lines else "")


@dataclass(kw_only=True)
class Supervisor:
    """The state of the workers. It holds no reference to the ``WorkerGroup``, which ends when nothing refers to it.

    Times are those of the monotonic clock.
    """

    workers: Sequence[WorkerProcess]
    timeout: float  # seconds that rank 0 waits while nobody says anything
    changed: threading.Condition = field(default_factory=threading.Condition)
    answers: dict[int, dict[int, Any]] = field(default_factory=dict)  # by number of the message and rank
    closing: bool = False
    ended: str = ""  # why rank 0 has ended them
    gone: list[WorkerProcess] = field(default_factory=list)  # in that order
    heard: float = 0.0  # when a worker last said something
    _began: float | None = None  # when rank 0 began the work that it is inside of
    _alive: float = 0.0  # when it last got on with it
    _lost: float = 0.0  # when the first was gone
    _refused: tuple[float, str] = (0.0, "")  # when a worker last refused to do its part, and why

    def begin(self) -> None:
        """Rank 0 begins work that it may need the others for."""
        self._alive = self._began = time.monotonic()

    def leave(self) -> None:
        """Rank 0 has left that work."""
        self._began = None

    def alive(self) -> None:
        """Rank 0 gets on with its work. ``RankUnreachable`` where another is gone."""
        self.require_all()
        self._alive = time.monotonic()

    def require_all(self) -> None:
        """``RankUnreachable`` if a rank is gone."""
        if self.gone or self.ended:
            raise RankUnreachable("a rank is gone", 0.0)

    def require_before(self, since: float) -> None:
        """``RankUnreachable`` if nobody has said anything for as long as rank 0 waits, and it waits ``since`` then."""
        waited = time.monotonic() - max(since, self.heard)
        if waited > self.timeout:
            raise RankUnreachable("no answer", waited)

    def send(self, message: object) -> None:
        """``message`` to all that still take it; nothing is raised where one does not."""
        data = bytes(ForkingPickler.dumps(message))
        for worker in self.workers:
            if worker in self.gone:
                continue
            try:
                worker.connection.send_bytes(data)
            except BlockingIOError:
                # half of it may be on the way, so nothing that follows would be understood
                self._lose(worker, Failed(reason=self._no_answer, waited=False))
                worker.process.kill()
            except OSError:  # the watching thread finds out
                pass

    def fault(self, error: BaseException | None) -> str:
        """Which worker caused the failure of rank 0 (``error``; None: it waits), and why; empty: none of them.

        One that ended without a message comes first, then one that failed by itself, which the others miss. Then
        those that are silent where rank 0 has waited until the timeout.
        """
        with self.changed:
            own = [worker for worker in self.gone if worker.failure is None or not worker.failure.waited]
            silent = [worker.name for worker in self.workers if worker not in self.gone]
        if own:
            worst = min(own, key=lambda worker: worker.failure is not None)
            return f"{worst.name}: {worst.why}"
        if silent and (
            error is None or (isinstance(error, RankUnreachable) and error.seconds > self.timeout / 2)
        ):
            return f"{' and '.join(silent)}: {self._no_answer}"
        return f"{self.gone[0].name}: {self.gone[0].why}" if error is None else ""

    @property
    def is_plain(self) -> bool:
        """Whether nothing more can be learnt of a failure."""
        with self.changed:
            return len(self.gone) == len(self.workers) or any(not worker.failure for worker in self.gone)

    def watch(self) -> None:
        """Take in what workers say, and look at the clock, until rank 0 has done with them. The work of a thread."""
        open_ones = {worker.connection: worker for worker in self.workers}
        while not self.closing:
            for connection in wait(list(open_ones), _TICK):
                worker = open_ones[connection]  # type: ignore[index]
                try:
                    number, value = worker.connection.recv()
                except (EOFError, OSError):
                    del open_ones[worker.connection]
                    self._lose(worker, None)
                else:
                    self._take(worker, number, value)
            self._leave_if_stuck()

    def _take(self, worker: WorkerProcess, number: int, value: object) -> None:
        if isinstance(value, Failed):
            self._lose(worker, value)
            return
        with self.changed:
            self.heard = time.monotonic()
            if isinstance(value, UserError):
                self._refused = self.heard, f"{worker.name}: {value}"
            if not isinstance(value, Alive):
                self.answers.setdefault(number, {})[worker.place.rank] = value
                self.changed.notify_all()

    def _lose(self, worker: WorkerProcess, word: Failed | None) -> None:
        with self.changed:
            if self.closing or worker in self.gone:
                return
            worker.failure = word
            self._lost = self._lost or time.monotonic()
            self.gone.append(worker)
            self.changed.notify_all()

    def _leave_if_stuck(self) -> None:
        """End this process if its main thread waits where nothing else can end it, as in a kernel for another rank."""
        with self.changed:
            began, now, (when, refusal) = self._began, time.monotonic(), self._refused
            if self.closing or began is None:
                return
            since = max(began, self._alive)
        if self.gone and now - max(since, self._lost) > GRACE:
            code = 1
        elif when > began and now - max(since, when) > GRACE:
            code = 2
        elif now - max(since, self.heard) > self.timeout + GRACE:
            code = 1
        else:
            return
        lost = f"the device is lost ({self.fault(None)}); run the command again to continue"
        print(f"\nspecgen: {lost if code == 1 else refusal}", file=sys.stderr)
        sys.stderr.flush()
        for worker in self.workers:
            worker.process.kill()  # one that hangs does not see that this process ends
        os._exit(code)

    @property
    def _no_answer(self) -> str:
        return f"no answer for {self.timeout:,.0f} s"


def _worker() -> "type[Worker]":
    """Whose methods are what is sent, each by its name; it imports this module."""
    from specgen.engine.worker import Worker

    return Worker


def launch(place: Place) -> WorkerProcess:
    """Start the process of a rank, which waits for what ``Supervisor.send`` tells it."""
    ours, theirs = socket.socketpair()
    # so that no process which takes nothing in holds this one up
    limit = struct.pack("ll", int(place.timeout), int(place.timeout % 1 * 1e6))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    stderr = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
    with theirs:
        process = subprocess.Popen(
            # -P: as this process, it finds no modules in the working directory
            [sys.executable, "-P", "-m", "specgen.engine.worker", str(theirs.fileno()), str(place.rank)],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # a terminal's signals are for rank 0
        )
    return WorkerProcess(place=place, process=process, connection=Connection(ours.detach()), stderr=stderr)


class WorkerGroup:
    """The workers of ranks 1 and up; this process is rank 0. They end with it, whatever ends it."""

    def __init__(self, place: Place, workers: Sequence[WorkerProcess]) -> None:
        self._place = place
        self._supervisor = Supervisor(workers=workers, timeout=place.timeout)
        self._numbers, self._ids = count(), count()
        self.ranks = Ranks()  # until they have met
        self.deferred: deque[tuple[Callable[[Worker, int], None], int]] = deque()  # sent before the next call
        self.runners: weakref.WeakSet[Runner] = weakref.WeakSet()
        self._leave = _leaving()
        weakref.finalize(self, _close, self._supervisor, self.runners, self._leave)
        threading.Thread(target=self._supervisor.watch, daemon=True).start()

    def meet(self, store: TCPStore) -> None:
        """Form the process group of all ranks."""
        with self.working(_worker().join) as number:
            self.ranks = join(self._place, self._supervisor.alive, store)
        self.answers(number)

    def next_id(self) -> int:
        """For a model or an engine."""
        return next(self._ids)

    def alive(self) -> None:
        self._supervisor.alive()

    def broadcast(self, call: "Callable[[Worker, *Ts], None]", *arguments: *Ts) -> int:
        """Have every worker do ``call``, a method of ``Worker``; returns the number of the message.

        A worker that is gone is noticed later.
        """
        if self._supervisor.closing:  # also as this process ends, when little is left of it
            return next(self._numbers)
        while self.deferred:
            earlier, which = self.deferred.popleft()
            self.broadcast(earlier, which)
        number = next(self._numbers)
        self._supervisor.send((number, call, arguments))
        return number

    @contextmanager
    def working(self, call: "Callable[[Worker, *Ts], None]", *arguments: *Ts) -> Iterator[int]:
        """``broadcast``, around what this rank does of it.

        What interrupts it, and is neither the device's failure nor a refusal, leaves this rank where the others are
        not: they end, so that nothing goes on with them.
        """
        self._supervisor.require_all()
        self._supervisor.begin()
        try:
            yield self.broadcast(call, *arguments)
        except (RuntimeError, UserError):
            raise
        except Exception as error:
            self._end(f"{self._place.name}: {type(error).__name__}: {first_line(error)}")
            raise
        except BaseException:
            self._end(f"{self._place.name}: interrupted within a pass")
            raise
        finally:
            self._supervisor.leave()

    def answers(self, number: int) -> list[Any]:
        """By rank. Raises a worker's ``UserError``, or ``RankUnreachable`` if one is gone or all are silent."""
        began, supervisor = time.monotonic(), self._supervisor
        with supervisor.changed:
            while len(found := supervisor.answers.get(number, {})) < len(supervisor.workers):
                supervisor.require_all()
                supervisor.require_before(began)
                supervisor.changed.wait(0.5)
            for old in [each for each in supervisor.answers if each <= number]:
                del supervisor.answers[old]
        for worker in supervisor.workers:
            if isinstance(value := found[worker.place.rank], UserError):
                raise UserError(f"{worker.name}: {value}")
        return [found[worker.place.rank] for worker in supervisor.workers]

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until ``ready``, by polling; ``RankUnreachable`` where a rank is gone, or has none of it for too long."""
        began = time.monotonic()
        while True:
            self._supervisor.require_all()
            if ready():
                return
            self._supervisor.require_before(began)
            time.sleep(min(max(_PAUSE * (time.monotonic() - began), _SHORTEST), _LONGEST))

    def diagnose(self, error: BaseException) -> str:
        """Which rank caused ``error``, raised on this one, and why; ends the other ranks."""
        limit, supervisor = time.monotonic() + _GATHER, self._supervisor
        with supervisor.changed:
            while time.monotonic() < limit and not (supervisor.ended or supervisor.is_plain):
                supervisor.changed.wait(0.1)
        self._end(supervisor.fault(error) or f"{self._place.name}: {first_line(error)}")
        return supervisor.ended

    def _end(self, why: str) -> None:
        """End the other ranks at once, for they cannot go on; the first ``why`` is what is said from then on."""
        with self._supervisor.changed:
            if self._supervisor.ended:
                return
            self._supervisor.closing, self._supervisor.ended = True, why
        for worker in self._supervisor.workers:
            worker.process.kill()
            with suppress(subprocess.TimeoutExpired):  # a fault of its GPU may hold it
                worker.process.wait(END)
        if self._place.device != "cpu":
            # kernels may wait for the others without end, and an orderly exit for the kernels
            atexit.register(exit_within, GRACE)
        else:
            self._leave()


def exit_within(seconds: float) -> None:
    """From now on this process has so many ``seconds`` to end, with exit code 1 where it does not.

    A thread of C does it, for which the interpreter need not run; behind its end too there is the alarm.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=os.open(os.devnull, os.O_WRONLY))
    signal.alarm(int(2 * seconds) + 1)


def _leaving() -> Callable[[], None]:
    """A function that leaves the group, and this process as it is now."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    num_threads = torch.get_num_threads()

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        torch.set_num_threads(num_threads)

    return leave


def start(device: torch.device, size: int) -> WorkerGroup:
    """Start ``size`` - 1 processes, with this one as rank 0 on ``device`` and the others on the devices behind it.

    ``UserError`` where this process is in another group; ``DeviceLost`` where one does not come up.
    """
    require(
        not dist.is_initialized(),
        f"tensor-parallel is {size} and this process is in another group of torch.distributed: use a separate process",
    )
    # as an OpenMP thread pool of each rank would take all cores for itself
    num_threads = max(torch.get_num_threads() // size, 1) if device.type == "cpu" else torch.get_num_threads()
    with socket.create_server(("127.0.0.1", 0)) as server:  # torch's own would listen on all interfaces
        port: int = server.getsockname()[1]
        listening = server.detach()
    store = TCPStore(
        "127.0.0.1", port, size, is_master=True, wait_for_workers=False, master_listen_fd=listening
    )
    places = [
        Place(
            rank=rank,
            size=size,
            device=device.type if device.index is None else f"{device.type}:{device.index + rank}",
            port=port,
            timeout=TIMEOUT,
            num_threads=num_threads,
        )
        for rank in range(size)
    ]
    workers = WorkerGroup(places[0], [launch(place) for place in places[1:]])
    try:
        workers.answers(workers.broadcast(_worker().start, places))
        workers.meet(store)
    except RuntimeError as error:
        raise DeviceLost(workers.diagnose(error), ()) from error
    return workers


def _close(supervisor: Supervisor, runners: "weakref.WeakSet[Runner]", leave: Callable[[], None]) -> None:
    """Let the processes end, and leave the group."""
    with supervisor.changed:
        if supervisor.closing:
            return
        supervisor.closing = True
    supervisor.send((-1, _worker().close, ()))
    for runner in runners:
        runner.forget()
    leave()
    for worker in supervisor.workers:
        try:
            worker.process.wait(END)
        except subprocess.TimeoutExpired:
            worker.process.kill()


def peers_of(config: EngineConfig) -> Peers:
    """Those of a model that a resolved ``config`` loads; starts them unless an earlier model's are still there."""
    if config.tensor_parallel == 1:
        return Peers()
    gc.collect()  # a model that nothing refers to any more may still hold the processes of other devices
    key = config.device, config.tensor_parallel
    workers = _worker_groups.get(key)
    if workers is None:
        require(
            not _worker_groups,
            f"tensor-parallel is {config.tensor_parallel} on {config.device}, and an engine of this process has "
            f"{' and '.join(f'{size} on {device}' for device, size in _worker_groups)}: use one number in a process",
        )
        workers = _worker_groups[key] = start(torch.device(config.device), config.tensor_parallel)
    return ModelPeers(workers)


class ModelPeers(Peers):
    """The peers of a model. Engines that only try something out (``build.num_pages``) are made by each for itself."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.ranks = workers.ranks
        self._workers = workers
        self._model = workers.next_id()
        self._on_end(_worker().drop_model, self._model)

    def loading(self, config: EngineConfig) -> AbstractContextManager[object]:
        return self._answered(_worker().load, self._model, config)

    def calling(
        self, function: Callable[..., object], config: EngineConfig, *arguments: object
    ) -> AbstractContextManager[object]:
        return self._answered(_worker().function, self._model, config, function, *arguments)

    def least(self, number: Callable[..., int], config: EngineConfig, models: object) -> int:
        with self._answered(_worker().function, self._model, config, number) as others:
            mine = number(config, models)
        return int(min(mine, *others))

    @contextmanager
    def _answered(self, call: "Callable[[Worker, *Ts], None]", *arguments: *Ts) -> Iterator[list[Any]]:
        """``WorkerGroup.working``; yields a list that has the answers at the end."""
        answers: list[Any] = []
        with self._diagnosing():
            with self._workers.working(call, *arguments) as number:
                yield answers
            answers += self._workers.answers(number)

    def of_engine(self, config: EngineConfig, expected: SamplingParams) -> Peers:
        return EnginePeers(self._workers, self._model, config, expected)

    def record(self, numbers: Iterable[int]) -> None:
        self._workers.alive()

    def require_recoverable(self, error: RuntimeError) -> None:
        raise error

    def wait(self, numbers: HostCopy) -> None:
        self._workers.wait(lambda: numbers.ready)

    def require(self, error: RuntimeError, requests: tuple[str, ...] = ()) -> NoReturn:
        if isinstance(error, DeviceLost):
            raise error
        raise DeviceLost(self._workers.diagnose(error), requests) from error

    @contextmanager
    def _diagnosing(self, requests: tuple[str, ...] = ()) -> Iterator[None]:
        """``DeviceLost`` for what fails within."""
        try:
            yield
        except RuntimeError as error:
            self.require(error, requests)

    def _on_end(self, call: "Callable[[Worker, int], None]", which: int) -> None:
        """Send ``call`` once nothing refers to this: with the next call, as finalizers may run during a send."""
        weakref.finalize(self, self._workers.deferred.append, (call, which)).atexit = False


class EnginePeers(ModelPeers):
    """The peers of an engine, to which every call of it is sent."""

    def __init__(
        self, workers: WorkerGroup, model: int, config: EngineConfig, expected: SamplingParams
    ) -> None:
        self.ranks = workers.ranks
        self._workers = workers
        gc.collect()  # an engine that nothing refers to any more may still be there
        self._engine = workers.next_id()
        self._on_end(_worker().drop_engine, self._engine)
        self._asked = model, config, expected
        self._checksum = Checksum()

    def assemble(self, num_pages: Callable[[], int], runner: Runner) -> int:
        self._workers.runners.add(runner)
        runner.has_peers = True
        with self._answered(_worker().build, self._engine, *self._asked) as others:
            mine = num_pages()
        pages = int(min(mine, *others))
        self._workers.broadcast(_worker().assemble, self._engine, pages)
        return pages

    def broadcast(self, call: "Callable[[EngineCore, *Ts], object]", *arguments: *Ts) -> None:
        self._workers.broadcast(_worker().engine, self._engine, self._checksum.value, call, *arguments)

    def working(self, call: "Callable[[EngineCore], object]") -> AbstractContextManager[object]:
        return self._workers.working(_worker().engine, self._engine, self._checksum.value, call)

    def record(self, numbers: Iterable[int]) -> None:
        super().record(numbers)
        self._checksum.add(numbers)

    def agree(self, requests: Iterable[str]) -> None:
        with self._diagnosing(tuple(requests)):
            number = self._workers.broadcast(_worker().agree, self._engine, self._checksum.value)
            self._workers.answers(number)
