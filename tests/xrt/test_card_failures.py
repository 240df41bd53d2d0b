"""Faults of a card are noticed and reported, and the host redoes the work from the place that is untouched.

Mistakes of a driver, such as missing syncs and bad pointers, are noticed on the emulated card, too.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hls.description import ERROR_BITS, INTERFACE_VERSION, KERNELS, STATUS_WORDS
from lightning_smartinfinity.devices.smartssd.discovery.cards import emulated_card
from lightning_smartinfinity.devices.smartssd.pyxrt_binding import PyxrtBinding
from lightning_smartinfinity.native import CardError, DType
from tests.helpers.card_runs import setup_of
from tests.helpers.compressed import compress
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import Hold
from tests.helpers.runif import RunIf
from tests.helpers.waiting import LIMIT, await_that, lenient
from tests.native.stored import Run
from tests.xrt.card_state import (
    GRADIENT,
    NUMEL,
    STEP,
    CardState,
    bound,
    fail,
    make_good,
    runs_of,
    small_state,
    succeed,
)
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

ADAMW = KERNELS[0]
GRADIENT_POINTER, PARAMETER, STATUS = 0, 7, 8  # pointers of adamw_update, in the order of its arguments
STATUS_BYTES = 64

# Kind of fault, where it is, and what is told.
KINDS = {
    "error": ("error", {}, r"ended with ERROR \(5\)"),
    "abort": ("abort", {}, r"ended with ABORT \(6\)"),
    "parameter": (
        "corrupt",
        {"pointer": PARAMETER, "bit": 77},
        "the parameters arrived with another checksum than the kernel wrote them with",
    ),
    "submit": ("submit", {}, "xrtRunStart failed"),
    "sync": ("sync", {}, r"xrtBOSync of \d+ bytes (to|from) the card failed"),
    "lost": ("lost", {}, r"failed|ended with ABORT \(6\)"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_failed_runs_and_calls(tmp_path: Path, emulated_cards: EmulatedCards, kind: str) -> None:
    """Every failed run or call is reported and made good by the host, and the card works again afterwards.

    Nothing hangs on a lost card, not even closing.
    """
    fault, where, message = KINDS[kind]
    with small_state(tmp_path, emulated_cards) as state:
        for number in range(5):
            emulated_cards.inject(fault, skipped=number, **where)
            failure, parameter = fail(state)
            told = f"the card did not update tasklet {failure.tasklet} of {state.stored.paths[0]}: "
            assert re.fullmatch(re.escape(told) + f".*({message}).*", failure.message)
            assert failure.tasklet in range(5) and not state.pipeline.busy
            make_good(state, parameter)
            if kind == "lost":
                return
        succeed(state)


# Word of the status, a bit of it that is wrong, and what is told.
WORDS = [
    ("magic", 6, "there is no status of a kernel"),
    ("version_and_kernel", 6, rf"interface is version {INTERFACE_VERSION ^ 64}, expected {INTERFACE_VERSION}$"),
    # The kernel's number is the upper half of this word.
    ("version_and_kernel", 22, f"kernel {ADAMW.number ^ 64} answered, expected {ADAMW.number}, adamw_update"),
    ("count", 6, rf"the kernel updated {NUMEL ^ 64} elements, expected {NUMEL}"),
    *(
        ("errors", ERROR_BITS[error].bit_length() - 1, rf"\({ERROR_BITS[error]}: {words}\)")
        for error, words in (
            ("bad_index", "an index is out of range or order"),
            ("bad_header", "the payload's header is wrong"),
            ("bad_range", "the range of elements is wrong"),
            ("unknown_form", "the form is unknown"),
            ("wrong_counts", "the counts do not give the header's sum"),
            ("bad_code", "an exponent or a code is none"),
        )
    ),
    ("errors", 6, r"reports errors \(64\)"),
    ("gradient_read", 6, "the gradient arrived with another checksum"),
    ("indices_read", 6, "the gradient's indices or exponents arrived with another checksum"),
    ("header_read", 6, "the gradient's header or counts arrived with another checksum"),
    *((f"array{number}_read", 6, f"array {number} arrived with another checksum") for number in range(3)),
    *((f"array{number}_written", 6, "") for number in range(3)),
    ("array3_read", 6, "the kernel has an array 3"),
    ("array3_written", 6, "the kernel has an array 3"),
    ("parameter_written", 6, "the parameters arrived with another checksum"),
]


def test_the_table_has_every_word() -> None:
    assert {word for word, _, _ in WORDS} == {*STATUS_WORDS}


@pytest.mark.parametrize(("word", "bit", "told"), WORDS)
def test_words_of_the_status(tmp_path: Path, emulated_cards: EmulatedCards, word: str, bit: int, told: str) -> None:
    """Each word of the status is checked and explained. The next read checks checksums of arrays that were written."""
    payload = compress(GRADIENT, 0.1, DType.FLOAT32).tobytes()
    with small_state(tmp_path, emulated_cards, tasklet_numel=0) as state:
        state.stored.payloads = {0: np.frombuffer(payload, np.uint8).copy()}
        emulated_cards.inject("corrupt", pointer=STATUS, bit=32 * STATUS_WORDS.index(word) + bit)
        runs = [Run(0, NUMEL, 0, parameter=np.zeros(NUMEL, np.float32))]
        failure = state.update(runs, [STEP])
        if not told:
            assert failure is None
            failure = state.update(runs, [STEP])
            told = f"array {word[5]} arrived with another checksum than it was written with"
        assert failure is not None and failure.kind == "device" and re.search(told, failure.message), failure


def test_another_generation(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """The trailer is checked before anything runs, as on the host."""
    with small_state(tmp_path, emulated_cards) as state:
        state.stored.generation += 1
        failure, _ = fail(state, "generation")
        assert "generation is 1, expected 2" in failure.message
    assert emulated_cards.counter("runs_begun") == 0


def test_a_gradient_file_that_cannot_be_written(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """The failure has the file and the reason, and the host goes on."""
    with small_state(tmp_path, emulated_cards, gradient_path=Path("/dev/full")) as state:
        failure, parameter = fail(state)
        assert failure.errno == errno.ENOSPC
        assert "writing the gradient in /dev/full failed: No space left on device" in failure.message
        make_good(state, parameter)


@pytest.mark.parametrize("method", ["set_scalar", "set_buffer", "start", "wait", "state", "sync", "part"])
@pytest.mark.usefixtures("pyxrt")
def test_a_binding_that_raises(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """An exception that Python raises in a thread of the pipeline counts as a failed call."""
    binding = bound(emulated_cards)
    # Only the case with a hung run needs a short deadline; other calls may be slow on a machine under load.
    timeout_ms = round(1000 * lenient()) if method == "state" else 60_000
    with small_state(tmp_path, emulated_cards, binding=binding, timeout_ms=timeout_ms) as state:
        with monkeypatch.context() as patched:
            if method == "state":
                patched.setattr(binding, "wait", lambda *_: 3)  # still running
            patched.setattr(binding, method, lambda *_: 1 / 0)
            failure, parameter = fail(state)
        assert f"{method} failed: division by zero" in failure.message
        make_good(state, parameter)
        succeed(state)


@pytest.mark.usefixtures("pyxrt")
def test_arrays_in_different_banks(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel with arrays in different banks is refused, because XRT would silently copy them."""
    binding = bound(emulated_cards)
    monkeypatch.setattr(binding, "group", lambda kernel, argument: argument)
    told = "arrays of kernel adamw_update are in different memory banks"
    with pytest.raises(CardError, match=told), small_state(tmp_path, emulated_cards, binding=binding):
        pass


class CarelessBinding(PyxrtBinding):
    """A binding that leaves out a sync, or passes another buffer.

    Attributes:
        unsynced: Direction of the sync that is left out, and whether it is that of the status.
        short: Which pointer gets a buffer of how many bytes.
        shifted: Which pointer gets the part of its buffer behind the first bytes.
    """

    unsynced: tuple[bool, bool] | None = None
    short: tuple[int, int] | None = None
    shifted: int | None = None

    def sync(self, buffer: Any, to_card: bool, nbytes: int, offset: int) -> None:
        if (to_card, nbytes == STATUS_BYTES) != self.unsynced:
            super().sync(buffer, to_card, nbytes, offset)

    def set_buffer(self, run: Any, index: int, buffer: Any) -> None:
        if self.short is not None and self.short[0] == index:
            buffer = self._kept = self.allocate(self.short[1], False, 0)
        if self.shifted == index:
            buffer = self._kept = self.part(buffer, 4 * NUMEL, 32)
        super().set_buffer(run, index, buffer)


@pytest.mark.parametrize(
    ("mistake", "told", "reason"),
    [
        ({"unsynced": (True, False)}, "the gradient arrived with another checksum", ""),
        ({"unsynced": (False, False)}, "the parameters arrived with another checksum", ""),
        ({"unsynced": (False, True)}, "there is no status of a kernel", ""),
        ({"short": (GRADIENT_POINTER, 4096)}, "ended with ERROR", "pointer 0 .*past its buffer"),
        # It ends within a page.
        ({"short": (PARAMETER, 4 * NUMEL - 64)}, "ended with ERROR", "pointer 7 .*past its buffer"),
        ({"shifted": GRADIENT_POINTER}, "ended with ERROR", "not 64-byte aligned"),
    ],
)
@pytest.mark.usefixtures("pyxrt")
def test_mistakes_of_a_driver(
    tmp_path: Path, emulated_cards: EmulatedCards, mistake: dict[str, Any], told: str, reason: str
) -> None:
    """Memory of host and card is apart and poisoned, and a beat outside of a pointer's buffer is an error."""
    binding = CarelessBinding(emulated_card(0), setup_of(1, emulated_cards.build.xclbin).xclbin, num_cards=1)
    with small_state(tmp_path, emulated_cards, tasklet_numel=0, binding=binding) as state:
        vars(binding).update(mistake)
        failure, parameter = fail(state)
        assert re.search(told, failure.message)
        assert re.search(reason, " ".join(emulated_cards.events("run-end")[-1].fields[3:]))
        make_good(state, parameter)


# ---- runs, reads, writes and syncs that do not return are given up, and keep the memory that they still use


READING = r"reading \d+ bytes at offset \d+ of {path} \(tasklet \d\)"
SYNC = r"the card did not update tasklet \d of .*: a sync of \d+ bytes (to|from) the card"
RUN = r"the card did not update tasklet \d of .*"
LATE: dict[str, tuple[dict[str, Any] | str, int, str]] = {
    "read": ({"read_at": 0}, 0, READING),
    "read of a trailer": ({"read_at": 1}, 0, READING),
    "last read": ({"read_at": 5}, 0, READING),
    "gradient to its file": ({"write_at": 2, "gradients": True}, 0, RUN + r"writing the gradient in .*/gradients"),
    "gradient from its file": ({"read_at": 0, "gradients": True}, 0, RUN + r"reading the gradient in .*/gradients"),
    "first sync": ("stall", 0, SYNC),
    "third sync": ("stall", 2, SYNC),
    "fifth sync": ("stall", 4, SYNC),
    "run": ("hang", 0, RUN),
    "third run": ("hang", 2, RUN),
}
"""What is held or injected, how many pass before it, and what is told."""
USUAL = [kind for kind in LATE if "third" not in kind and "trailer" not in kind]


@pytest.fixture
def timeout_ms() -> int:
    """Milliseconds after which a card's requests are given up."""
    return round(1000 * lenient())


def begin(kind: str, state: CardState, cards: EmulatedCards, card: int = 0) -> Callable[[], None]:
    """Prepare something late, and return the function that lets it go on."""
    what, skipped, _ = LATE[kind]
    if isinstance(what, str):
        cards.inject(what, card=card, skipped=skipped)
        return cards.release
    return Hold(state.pipeline, **what).release


@pytest.mark.parametrize("kind", long_but(USUAL, LATE))
def test_late(tmp_path: Path, emulated_cards: EmulatedCards, timeout_ms: int, kind: str) -> None:
    """The host does the rest at once, and the card takes no work before what was given up returns."""
    gradients = tmp_path / "gradients" if "gradient" in kind else None
    with small_state(tmp_path, emulated_cards, timeout_ms=timeout_ms, gradient_path=gradients) as state:
        release = begin(kind, state, emulated_cards)
        failure, parameter = fail(state)
        told = LATE[kind][2].replace("{path}", re.escape(str(state.stored.paths[0])))
        assert re.fullmatch(f"{told}.* did not return within {timeout_ms} ms", failure.message)
        assert state.pipeline.busy and state.pipeline.writes_out() == []
        with pytest.raises(ValueError, match="what was abandoned, as it did not return in time, has not returned"):
            state.submit(runs_of(parameter), [STEP])
        make_good(state, parameter)
        release()
        succeed(state)


@pytest.mark.parametrize(("number", "count"), [(0, 1), (1, 1), (0, 100)])
def test_late_writes(tmp_path: Path, emulated_cards: EmulatedCards, timeout_ms: int, number: int, count: int) -> None:
    """The pipeline tells where late writes may still write, and their tasklets are not done."""
    with small_state(tmp_path, emulated_cards, timeout_ms=timeout_ms) as state:
        hold = Hold(state.pipeline, write_at=number, count=count)
        failure, parameter = fail(state)
        told = re.fullmatch(
            rf"writing (\d+) bytes at offset (\d+) of .* \(tasklet (\d)\) did not return within {timeout_ms} ms",
            failure.message,
        )
        assert told is not None and state.pipeline.busy
        nbytes, offset, tasklet = map(int, told.groups())
        assert (offset, nbytes) in state.pipeline.writes_out()
        assert len(state.pipeline.writes_out()) == hold.count and (hold.count == 1) == (count == 1)
        start = state.stored.extent_offset(tasklet, 1 - state.stored.place)
        assert start <= offset and offset + nbytes <= start + state.stored.extent_bytes_of(tasklet)
        assert tasklet not in state.pipeline.finished()
        hold.release()
        await_that(lambda: not state.pipeline.busy)
        assert state.pipeline.writes_out() == []
        make_good(state, parameter)
        succeed(state)


@pytest.mark.usefixtures("pyxrt")
def test_late_start(
    tmp_path: Path, emulated_cards: EmulatedCards, timeout_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that may still begin keeps its memory until it has ended."""
    binding, started = bound(emulated_cards), threading.Event()
    start = binding.start

    def late(run: Any) -> None:
        started.wait(LIMIT)
        start(run)

    with small_state(tmp_path, emulated_cards, timeout_ms=timeout_ms, binding=binding, compute_threads=1) as state:
        monkeypatch.setattr(binding, "start", late)
        failure, parameter = fail(state)
        told = f"the start of a run of kernel adamw_update did not return within {timeout_ms} ms"
        assert told in failure.message and state.pipeline.busy
        make_good(state, parameter)
        emulated_cards.inject("hang")
        started.set()
        emulated_cards.wait_for("run-hung")
        assert state.pipeline.busy
        emulated_cards.release()
        succeed(state)


@pytest.mark.parametrize(("kind", "lost"), [("run", 2), ("read of a trailer", 3), ("first sync", 4)])
def test_closing_with_something_out(
    tmp_path: Path, emulated_cards: EmulatedCards, timeout_ms: int, kind: str, lost: int
) -> None:
    """Closing does not hang; memory that a late request may use is given up for lost, and late data harm nothing.

    The memory of the card stays taken.
    """
    emulated_cards.reset(count=5)
    before = emulated_cards.counter("num_buffers", lost)
    with small_state(tmp_path, emulated_cards, timeout_ms=timeout_ms, card=lost) as state:
        during = emulated_cards.counter("num_buffers", lost)
        release = begin(kind, state, emulated_cards, lost)
        fail(state)
    assert before < during <= emulated_cards.counter("num_buffers", lost)
    release()
    if kind == "run":
        emulated_cards.wait_for("run-end")
    with small_state(tmp_path / "again", emulated_cards, card=lost if kind == "run" else 0) as state:
        succeed(state)
