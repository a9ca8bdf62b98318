"""One interruption: prepare a scene, interrupt its call at a point, audit everything."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pagedkv as pk
from pagedkv.cache.dispatcher import Dispatcher
from pagedkv.observe.callbacks import has_no_memory
from tests.reliability.interrupt_control import OldOrder
from tests.reliability.interrupt_kinds import KINDS, Alarm, Foreign, Hung, innermost
from tests.reliability.interrupt_points import LIBRARY, Point, Tracer, room_of
from tests.reliability.interrupt_scenes import Act, Scene
from tests.reliability.interrupt_world import SLOWNESS, Leaked, World, Wrong
from tests.reliability.proof import Tally

FINDINGS = os.environ.get("PAGEDKV_INTERRUPT_FINDINGS", "")
GOLDEN = 0.6180339887498949
MODES = ("points", "signals", "callbacks", "allocations", "dispatcher", "control")


@dataclass
class Case:
    """What is interrupted, and where.

    Attributes
    ----------
    walk : how far along the call, 0..1.
    kind : which of `KINDS`.
    """

    mode: str
    world: World
    scene: Scene
    walk: float
    kind: int
    name: str

    @property
    def problem(self) -> BaseException:
        """What is to be raised."""
        return KINDS[self.kind % len(KINDS)]("interrupted")


class Cases:
    """Runs cases of one mode and counts.

    Parameters
    ----------
    mode : one of `MODES`.
    alarm : the process's watchdog.
    patience_s : before something that does not come back, or is not let go of, is wrong.
    planted : the fault of the control, if this is the control.
    """

    def __init__(
        self, mode: str, alarm: Alarm, patience_s: float, tally: Tally, planted: OldOrder | None = None
    ) -> None:
        self.mode, self.alarm, self.patience_s, self.tally = mode, alarm, patience_s, tally
        self._planted = planted
        self._known: dict[tuple[str, str], float] = {}  # by setup and scene: points, or seconds
        self._alloc: Any = None
        self._point: Point | None = None
        if mode in ("allocations", "dispatcher"):
            from tests.reliability.failing_alloc import FailingAlloc

            self._alloc = FailingAlloc()
            self._alloc.spare("_multiarray_umath")  # NumPy's own ways out corrupt memory
        self._rounds = FailingRounds(self._alloc) if mode == "dispatcher" else None

    def run(self, case: Case) -> bool:
        """One case; whether its world can be used for another."""
        faulthandler.dump_traceback_later(2 * self.patience_s + 30, exit=True)
        where = "before its call"
        try:
            with self.alarm.watch():
                act = case.scene.prepare(case.world)
                case.world.settle(self.patience_s)
                key = case.world.setup.name, case.scene.name
                if key not in self._known:
                    self._known[key] = self._measure(case, act)
                    SLOWNESS.delay_s = 0.0
                    act.undo()
                    case.world.settle(self.patience_s)
                    act = case.scene.prepare(case.world)
                    case.world.settle(self.patience_s)
                size = self._known[key]
                if not size:
                    act.undo()
                    return True
            where, what = self._interrupt(case, act, size)
            with self.alarm.watch():
                if not where:
                    self.tally.add("came too late")
                    act.undo()
                    case.world.settle(self.patience_s)
                    return True
                if self._planted is not None:
                    self._planted.after(case.world.cache)
                self.tally.count += 1
                self._audit(case, act)
            if what:
                raise Wrong(what)
        except (Hung, Exception) as found:
            if isinstance(found, Leaked) and self._alloc is not None and lost_by_cpython(case.world):
                self.tally.add("sequences that CPython lost a reference of where its own allocation failed")
                bare(found)
            else:
                self._found(case, where, found)
            return False
        finally:
            SLOWNESS.delay_s = 0.0
        return True

    def _found(self, case: Case, where: str, found: BaseException) -> None:
        sort = (
            "hung"
            if isinstance(found, Hung) or "for ever" in str(found)
            else "leaked"
            if isinstance(found, Leaked)
            else "wrong"
        )
        self.tally.add(sort)
        if "wrong KV" in str(found):
            self.tally.add("wrong bytes")
        at = innermost(found, LIBRARY) if not isinstance(found, (Leaked, Wrong)) else ""
        text = f"{sort}: {case.name}, {case.world.setup.name}, {case.scene.name}, {where}: {found!r} {at}"
        self.tally.fail(text)
        bare(found)
        report(text)

    # ---- interrupting

    def _measure(self, case: Case, act: Act) -> float:
        """How many points the call has, or how long it takes; rooms are counted by the way."""
        SLOWNESS.delay_s = case.world.setup.slow
        if self.mode == "points":
            tracer = Tracer()
            tracer.run(act.call)
            for room in tracer.rooms:
                self.tally.add(f"passed in {room}", tracer.rooms[room])
            return tracer.passed
        if self.mode == "callbacks":
            case.world.callbacks.arm(0)
            act.call()
            return case.world.callbacks.passed
        if self.mode == "allocations":
            self._alloc.arm(0)
            try:
                act.call()
            finally:
                seen = self._alloc.disarm()
            return float(seen)
        if self._rounds is not None:
            self._rounds.arm(0)
            act.call()
            case.world.settle(self.patience_s)
            return float(self._rounds.disarm())
        begun = time.perf_counter()
        act.call()
        return time.perf_counter() - begun

    def _interrupt(self, case: Case, act: Act, size: float) -> tuple[str, str]:
        """Make the call; return where it was interrupted, and what was wrong with what came out.

        The place is "" if the call was over before.
        """
        SLOWNESS.delay_s = case.world.setup.slow
        mode = "signals" if self.mode == "control" else self.mode
        return getattr(self, f"_{mode}")(case, act, size)  # type: ignore[no-any-return]

    def _points(self, case: Case, act: Act, size: float) -> tuple[str, str]:
        problem = case.problem
        tracer = Tracer(1 + int(case.walk * size), problem)
        with self.alarm.watch():
            came = caught(lambda: tracer.run(act.call))
        self._point = tracer.point
        if tracer.point is None:
            return "", "" if came is None else _unexpected(came)
        for room in tracer.point.rooms:
            self.tally.add(f"in {room}")
        if not tracer.point.signals:
            self.tally.add("at lines where CPython delivers no signal")
        return f"{tracer.point} [{type(problem).__name__}]", self._outcome(came, problem, tracer.point.stack)

    def _signals(self, case: Case, act: Act, size: float) -> tuple[str, str]:
        problem = case.problem
        came = caught(lambda: self.alarm.interrupt(act.call, problem, case.walk * size))
        inside = [f"{file.removeprefix(LIBRARY)}:{line} ({name})" for file, line, name in self.alarm.arrived
                  if file.startswith(LIBRARY)]  # fmt: skip
        if not inside:
            return "", "" if came is None or came is problem else _unexpected(came)
        self.tally.add("signals")
        self.tally.add(f"in {room_of(inside[0].partition(':')[0])}")
        in_callback = any(Path(file).name in ("weakref.py", "_weakrefset.py") for file, _, _ in self.alarm.arrived)
        stack = (*(name for _, _, name in self.alarm.arrived), *(("__del__",) if in_callback else ()))
        innermost = ", ".join(f"{Path(file).name}:{line} ({name})" for file, line, name in self.alarm.arrived[:3])
        where = f"signal at {inside[0]}, in {innermost} [{type(problem).__name__}]"
        return where, self._outcome(came, problem, stack)

    def _callbacks(self, case: Case, act: Act, size: float) -> tuple[str, str]:
        callbacks, problem = case.world.callbacks, Foreign() if case.kind % 2 else case.problem
        listener = case.world.listener
        listener.count = 0
        callbacks.arm(1 + int(case.walk * size), problem)
        with self.alarm.watch():
            came = caught(act.call)
        name = callbacks.raised
        callbacks.arm(0)
        if not name:
            return "", "" if came is None else _unexpected(came)
        self.tally.add(f"in {name}")
        if not isinstance(problem, Exception):
            return f"{name} [{type(problem).__name__}]", self._outcome(
                came, problem, ("__del__",) if callbacks.in_finalizer else ()
            )
        if isinstance(came, pk.InvalidArgument) and "first reading" in str(came):  # as the page on clocks says
            self.tally.add("clocks refused at opening")
            return f"{name} [{type(problem).__name__}]", ""
        what = "" if came is None else f"what a callback raised came out: {came!r} at {PLACES[0]}"
        sort = name.partition(".")[0]
        case.world.told[sort] = told = case.world.told.get(sort, 0) + listener.count
        if not what and sort != "log" and (listener.count > 1 or told < 1 or (sort == "hook" and told > 1)):
            what = f"the exceptions of {name} were logged {told} times, {listener.count} of them now, and not once"
        return f"{name} [{type(problem).__name__}]", what

    def _allocations(self, case: Case, act: Act, size: float) -> tuple[str, str]:
        alloc = self._alloc
        target = 1 + int(case.walk * size)

        def call() -> None:
            alloc.arm(target)
            try:
                act.call()
            finally:
                alloc.disarm()

        with self.alarm.watch():
            came = caught(call)
        if not alloc.failed:
            return "", "" if came is None else _unexpected(came)
        place = alloc.where
        room = room_of(place.removeprefix(LIBRARY)) if place.startswith(LIBRARY) else "interpreter"
        self.tally.add(f"allocations in {room}")
        if came is None:
            self.tally.add("allocations done without")
        elif not place.startswith(LIBRARY) and is_cpythons_own(came):
            self.tally.add("errors that CPython itself raises in place of a MemoryError")
        elif not has_no_memory(came):
            return f"allocation {target} in {place}", f"{came!r} came in place of a MemoryError at {PLACES[0]}"
        return f"allocation {target} in {place}", ""

    def _dispatcher(self, case: Case, act: Act, size: float) -> tuple[str, str]:
        rounds, target = self._rounds, 1 + int(case.walk * size)
        assert rounds is not None
        rounds.arm(target)
        with self.alarm.watch():
            came = caught(act.call)
            case.world.settle(self.patience_s)
        rounds.disarm()
        if not rounds.where:
            return "", "" if came is None else _unexpected(came)
        self.tally.add("allocations of the dispatcher")
        where = f"allocation {target} of the dispatcher, in {rounds.where}"
        if came is None:
            return where, ""
        return where, f"{came!r} came out of the call, at {PLACES[0]}"

    def _outcome(self, came: BaseException | None, problem: BaseException, stack: tuple[str, ...]) -> str:
        if came is problem:
            self.tally.add(f"{type(problem).__name__} came out")
            return ""
        if came is None and "__del__" in stack:
            self.tally.add("dropped by the interpreter in a finalizer")
            return ""
        if isinstance(came, Hung):
            raise came
        return f"{problem!r} was hidden: {came!r} came out"

    # ---- afterwards

    def _audit(self, case: Case, act: Act) -> None:
        """Everything that must hold after an interruption; `act` is made again and undone."""
        world = case.world
        prompts: list[list[int]] = []
        if act.garbage:
            gc.collect()
        try:
            with suppress(*([pk.OutOfBlocks] if act.busy else [])):
                prompts = world.press()
            for seq, namespace in act.seqs:
                self.tally.hits += world.check(seq, namespace)
            world.settle(self.patience_s)
        finally:
            SLOWNESS.delay_s = 0.0
        world.cache.check_integrity()
        if not act.busy:
            self.tally.hits += world.check_bystanders(prompts)
        for seq, namespace in act.seqs:
            self.tally.hits += world.check(seq, namespace)
        act.call()
        for seq, namespace in act.seqs:
            self.tally.hits += world.check(seq, namespace)
        act.undo()
        world.settle(self.patience_s)
        self.tally.hits += world.check_bystanders([] if not prompts else prompts[:1])
        world.settle(self.patience_s)
        world.cache.check_integrity()
        if world.check_books(self.patience_s):
            self.tally.add("let go of by the garbage collector alone")


def caught(call: Callable[[], object]) -> BaseException | None:
    """What came out of a call, without the frames that would keep what it had made."""
    try:
        call()
    except BaseException as problem:
        place = innermost(problem, LIBRARY)
        if place != "elsewhere":
            PLACES[0] = place
        bare(problem)
        return problem
    return None


class FailingRounds:
    """Fails an allocation in the dispatcher's thread.

    It fails in round number `target` since :meth:`arm`.

    Attributes
    ----------
    where : what asked for it, "" as long as none has failed.
    """

    def __init__(self, alloc: Any) -> None:
        self._alloc, self._target, self._seen, self._counts = alloc, 0, 0, False
        self.where = ""
        real = Dispatcher.round

        def armed_round(hands: Dispatcher, taken: Any) -> float | None:
            if not self._counts:
                return real(hands, taken)
            alloc.arm(max(0, self._target - self._seen))
            try:
                return real(hands, taken)
            finally:
                self._seen += alloc.disarm()
                if alloc.failed:
                    self.where, self._target = alloc.where or "somewhere", 0

        Dispatcher.round = armed_round  # type: ignore[method-assign]  # for the life of this process

    def arm(self, target: int) -> None:
        """Count from here; 0: have none fail."""
        self._target, self._seen, self._counts, self.where = target, 0, True, ""

    def disarm(self) -> int:
        """None fails any more; how many there were."""
        self._counts = False
        return self._seen


def is_cpythons_own(came: BaseException) -> bool:
    """What CPython says where its own code gets no memory and makes no MemoryError of that."""
    said = str(came)
    if isinstance(came, SystemError):
        return said.endswith(("without exception set", "without setting an exception"))
    return isinstance(came, RuntimeError) and said in ("can't allocate lock", "can't start new thread")


def lost_by_cpython(world: World) -> bool:
    """Whether nothing reaches the held sequences of this world: CPython lost a reference.

    It does where it has no memory for a frame. A function that calls another, in plain Python and without this library,
    shows the same.
    """
    gc.collect()
    known, engine = {id(seq) for seq in world.bystanders}, world.cache._engine
    alive = [one for one in gc.get_objects() if type(one) is pk.Sequence and one._engine is engine]
    strays = [one for one in alive if not one.is_released and id(one) not in known]
    return bool(strays) and not any(is_reachable(one, world, [alive, strays]) for one in strays)


def is_reachable(one: object, world: World, mine: list[object]) -> bool:
    """Whether a module, a class or the world leads to an object.

    Frames, and what this call itself holds, do not count.
    """
    seen, left = {id(found) for found in (*mine, mine)}, [one]
    seen.add(id(left))
    while left:
        holders = gc.get_referrers(left.pop())
        seen.add(id(holders))
        for holder in holders:
            if isinstance(holder, ModuleType | type) or holder is world or holder is vars(world):
                return True
            if id(holder) not in seen and not isinstance(holder, FrameType):
                seen.add(id(holder))
                left.append(holder)
    return False


PLACES = [""]  # where the last exception that was caught came from


def bare(problem: BaseException | None) -> None:
    """Forget the frames of an exception and of those that it came in the middle of."""
    while problem is not None:
        problem.__traceback__ = None
        problem = problem.__context__


def _unexpected(came: BaseException) -> str:
    if isinstance(came, Hung):
        raise came
    return f"{came!r} came out of a call that was not interrupted, at {PLACES[0]}"


def report(text: str) -> None:
    """Say at once what is wrong, also to the file that the environment names.

    The proof keeps only the first such report.
    """
    print(text, file=sys.stderr, flush=True)
    if FINDINGS:
        with open(FINDINGS, "a") as file:
            file.write(text + "\n")
