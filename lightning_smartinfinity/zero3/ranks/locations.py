"""Detects ranks that wait for each other in different collectives, and describes where each rank is.

A gather or a reduction costs only one more Python call. In each process, a thread looks at the training's thread once a
second. Only if the training's thread has begun no collective since the last look does it report the place to rank 0.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_smartinfinity.common.patches import replaced
from lightning_smartinfinity.native import RankWatch

__all__ = [
    "CERTAIN",
    "PlaceWatch",
    "RankPosition",
    "cut_connections",
    "describe",
    "find_divergence",
    "known_sockets",
    "note_model",
    "noting_waits",
    "where_is",
]

CERTAIN = 30.0
"""Seconds after which ranks that wait for each other at different places count as diverged."""

_SEVERAL = 8  # places, or parameters, that a message names
_KINDS = {
    "gather": "GATHER",
    "reduction": "REDUCE",
    "broadcast": "BROADCAST",
    "barrier": "BARRIER",
}  # values: words in the names of OpType
# Functions during which the other ranks may wait for any time, and source files of compilers, for which they may, too.
_LAWFUL_CALLS = {
    *("save_checkpoint", "dump_checkpoint", "load_checkpoint", "save_pretrained", "from_pretrained", "save_model"),
    *("_build_engine", "build_evaluation_engine"),
}
_COMPILERS = tuple(
    os.path.join("torch", *path) for path in (("_dynamo", "convert_frame.py"), ("_inductor", "compile_fx.py"))
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", sysconfig.get_paths()["stdlib"])
_OWN = str(Path(__file__).parents[2]) + os.sep  # the package


@dataclass(frozen=True)
class RankPosition:
    """Where a rank has been since it began its last collective.

    Attributes:
        doing: ``"waits"`` for a collective, ``"works"`` on something else, or has ``"ended"`` its training.
        lawful: Whether the others may wait for this rank for any time, such as during a save.
        counts: Number of collectives begun so far, by name of each group of all ranks.
        what: The kind of collective that it waits for.
        where: Description of the position.
        seconds: Seconds that it has been there.
    """

    doing: str
    lawful: bool
    counts: dict[str, int]
    what: str
    where: str
    seconds: float

    def is_ahead_of(self, other: RankPosition) -> bool:
        """Return whether this rank has begun a collective that the other rank has not."""
        return any(count > other.counts.get(group, count) for group, count in self.counts.items())


def find_divergence(places: dict[int, RankPosition], limit: float) -> bool:
    """Return whether ranks wait for each other and cannot meet any more.

    This is certain if every rank waits for a collective or has ended its training, and they do not all wait for the
    same collective. A working rank may still join, unless it has taken longer than the limit.

    Args:
        places: The positions of all ranks.
        limit: Seconds that a rank may take to join the others.
    """
    found = list(places.values())
    stuck = [place.doing != "works" or any(place.is_ahead_of(other) for other in found) for place in found]
    waiting = [place for place, is_stuck in zip(found, stuck, strict=True) if is_stuck and place.doing != "ended"]
    if not waiting:
        return False
    age = min(place.seconds for place in found)
    same = all((place.doing, place.what, place.counts) == ("waits", found[0].what, found[0].counts) for place in found)
    if all(stuck) and not same:
        return age >= min(CERTAIN, limit)
    return not all(stuck) and age >= limit and not any(place.lawful for place in found)


def describe(places: dict[int, RankPosition], hosts: list[str], limit: float) -> str:
    """Return text with one sentence for each place and the ranks there."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks.setdefault((place.doing, place.what, place.where), []).append(rank)
    sentences = []
    for (doing, what, where), group in list(ranks.items())[:_SEVERAL]:
        more = f" and {len(group) - 1} more ranks" if len(group) > 1 else ""
        seconds = min(places[rank].seconds for rank in group)
        verb = {
            "waits": f"has waited for {seconds:.0f} s in a {what} {where}",
            "works": f"has joined no collective for {seconds:.0f} s, {where}",
            "ended": f"ended its training {seconds:.0f} s ago",
        }[doing]
        sentences.append(f"Rank {group[0]} on {hosts[group[0]]}{more} {verb}.")
    if len(ranks) > _SEVERAL:
        sentences.append(f"{len(ranks) - _SEVERAL} more places are not listed.")
    late = any(place.doing == "works" for place in places.values())
    why = f"A rank has not come within collective_timeout={limit:g} s." if late else ""
    return " ".join(("The ranks wait for each other at different places.", why, *sentences)).replace("  ", " ")


class PlaceWatch(threading.Thread):
    """Reports to rank 0 where this rank waits. On rank 0 it also decides whether the ranks can still meet.

    Args:
        native: The watch over the ranks' processes, which sends the reports.
        hosts: Host of each rank.
        limit: Seconds that a rank may take to join the others.
        diverged: Function called once, when the watch reports that the ranks have diverged.
    """

    def __init__(self, native: RankWatch, hosts: list[str], limit: float, diverged: Callable[[], None]) -> None:
        super().__init__(name="smart-infinity-places", daemon=True)
        self._native, self._hosts, self._limit, self._diverged = native, hosts, limit, diverged
        self._tick = min(1.0, limit / 10)
        self._closed = threading.Event()
        self._begun: object = None
        self._age = 0.0
        self._told: dict[str, object] | None = None
        self.ended = False

    def run(self) -> None:
        """Look once per tick until the watch is closed."""
        while not self._closed.wait(self._tick):
            with suppress(ValueError):  # the watch was closed, or the process group destroyed
                self._look()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _look(self) -> None:
        begun = _counts(), _awaited.num, self.ended
        self._age = self._age + self._tick if begun == self._begun else 0.0
        self._begun = begun
        place = asdict(self._place()) if self._age else None
        if place != self._told:
            self._told = place
            # The receiving watch keeps counting the seconds from here.
            self._native.tell_place("" if place is None else json.dumps(place | {"seconds": self._age}))
        report = self._native.report()
        if report.diverged is not None:
            self._closed.set()
            self._diverged()
        elif not any((report.lost, report.failed, report.left, report.asked)):
            self._judge()

    def _place(self) -> RankPosition:
        work = _awaited.work
        what = "" if work is None else _kind_of(work)
        doing = "ended" if self.ended else "works" if work is None else "waits"
        where, lawful = ("", False) if self.ended else where_is(_awaited.thread)
        return RankPosition(doing, lawful, _counts(), what, where, seconds=0.0)

    def _judge(self) -> None:
        told = self._native.places()
        if len(told) < len(self._hosts) or not all(place.where for place in told.values()):
            return  # a rank makes progress, or this is not rank 0
        places = {}
        for rank, place in told.items():
            values = json.loads(place.where)
            places[rank] = RankPosition(**values | {"seconds": values["seconds"] + place.seconds})
        if find_divergence(places, self._limit):
            self._native.tell_divergence(describe(places, self._hosts, self._limit))


# ---- what this process does


class _Awaited:
    """The collective that the training's thread waits for.

    Attributes:
        thread: Id of the training's thread.
        num: Number of waits so far, in all threads.
        work: The collective while the thread waits for it; else None.
    """

    thread = 0
    num = 0
    work: Any = None


_awaited = _Awaited()
_model: weakref.ref[Any] | None = None


def note_model(engine: Any) -> None:
    """Describe places by this engine's modules, parameters and step, as long as the engine exists."""
    global _model
    _model = weakref.ref(engine)


@contextmanager
def noting_waits(explain: Callable[[RuntimeError], Exception | None]) -> Iterator[None]:
    """Record the collective that this thread waits for within this context.

    Args:
        explain: Function that returns the error to raise instead of a collective's, or None to keep that.
    """
    original = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
        is_awaited = threading.get_ident() == _awaited.thread
        _awaited.num += 1
        if is_awaited:
            _awaited.work = work
        try:
            return original(work, *args, **kwargs)
        except RuntimeError as error:
            if (known := explain(error)) is None:
                raise
            raise known from error
        finally:
            if is_awaited:
                _awaited.work = None

    _awaited.thread = threading.get_ident()
    with replaced(dist.Work, "wait", wait):
        yield


def _counts() -> dict[str, int]:
    """Return the number of collectives that this process has begun, by name of each group of all ranks."""
    known = list(distributed_c10d._world.pg_map)
    groups = [group for group in known if group.size() == dist.get_world_size()]
    return {group.group_name: group._get_sequence_number_for_group() for group in groups}  # type: ignore[attr-defined]


def _kind_of(work: dist.Work) -> str:
    """Return the kind of a collective in one word."""
    name = str(torch._C._distributed_c10d.OpType(work._get_op_type()))  # type: ignore[attr-defined]
    return next((kind for kind, word in _KINDS.items() if word in name), "collective")


def where_is(thread: int) -> tuple[str, bool]:
    """Return a description of where a thread is, and whether other ranks may wait for it for any time."""
    frames = list(_frames_of(thread))
    lawful = any(
        frame.f_code.co_name in _LAWFUL_CALLS or frame.f_code.co_filename.endswith(_COMPILERS) for frame in frames
    )
    engine: Any = None if _model is None else _model()
    told = [
        _tensors_of(frames, engine),
        next((f"in {stage}" for frame in frames if (stage := _stage(frame))), ""),
        next((f"at {_line(frame)}" for frame in frames if _is_of_user(frame)), ""),
        f"after step {engine.global_steps}" if getattr(engine, "global_steps", 0) else "",
    ]
    return ", ".join(filter(None, told)), lawful


def _frames_of(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_user(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not (path.startswith((_OWN, "<")) or any(folder in path for folder in _PACKAGES))


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _stage(frame: FrameType) -> str:
    """Return the hook that Lightning calls in a frame, or the frame's function in Lightning's loops; else empty."""
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    if path.endswith(os.path.join("trainer", "call.py")) and "hook_name" in frame.f_code.co_varnames:
        return str(frame.f_locals.get("hook_name"))
    is_loop = os.path.join("pytorch", "loops", "") in path and not name.startswith("_")
    return f"{Path(path).stem}.{name}" if is_loop else ""


def _tensors_of(frames: Iterable[FrameType], engine: Any) -> str:
    """Return a description of the parameters and the module in DeepSpeed's innermost calls."""
    if engine is None:
        return ""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    modules = {id(module): name for name, module in engine.module.named_modules() if name}
    of_params: list[str] = []
    of_module = ""
    for frame in frames:
        values = list(frame.f_locals.values()) if "deepspeed" in frame.f_code.co_filename else []
        params = [id(param) for value in values for param in _params_in(value)]
        of_params = of_params or list(dict.fromkeys(names[param] for param in params if param in names))
        of_module = of_module or next((modules[id(value)] for value in values if id(value) in modules), "")
    told = ", ".join(map(repr, of_params[:_SEVERAL])) + (", ..." if len(of_params) > _SEVERAL else "")
    return " ".join(filter(None, (told and f"of {told}", of_module and f"for module {of_module!r}")))


def _params_in(value: object) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters in a value: itself, its items, or the attributes of DeepSpeed's handles."""
    if isinstance(value, torch.nn.Parameter):
        yield value
    elif isinstance(value, (list, tuple, set)):
        yield from (item for item in list(value) if isinstance(item, torch.nn.Parameter))
    elif type(value).__module__.startswith("deepspeed.") and "Handle" in type(value).__name__:
        for held in list(vars(value).values()):
            yield from _params_in(held)


# ---- ending waits that cannot end


def known_sockets() -> set[str]:
    """Return the identifiers of this process's open sockets."""
    return set(_sockets().values())


def cut_connections(known: set[str]) -> None:
    """Shut down the connections between ranks on which gloo waits, as if the other ranks had been killed.

    Gloo has no call that ends a collective. The connections are those accepted by this process's listening sockets.

    Args:
        known: Sockets from before the ranks met. They may be shared with other processes, and are left alone.
    """
    opened = []
    for descriptor, name in _sockets().items():
        if name not in known:
            with suppress(OSError):
                opened.append(socket.socket(fileno=os.dup(descriptor)))
    with ExitStack() as closing:
        tcp = [closing.enter_context(each) for each in opened if each.family in (socket.AF_INET, socket.AF_INET6)]
        listens = {each for each in tcp if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
        ports = {each.getsockname()[1] for each in listens} - {int(os.environ.get("MASTER_PORT", "0"))}
        for each in tcp:
            if each not in listens and each.getsockname()[1] in ports:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found
