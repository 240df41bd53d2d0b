"""Waits with a limit, and deadlines that a busy machine can meet."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

LIMIT = 120.0
"""Seconds after which a test gives up a wait: less than the limit of a test, so that the wait says what is missing."""

PROCESS_LIMIT = 3 * LIMIT
"""Seconds after which a test stops a process that it waits for: less than the limit of a test, too."""

BUILD_LIMIT = 9 * LIMIT
"""Seconds after which a test stops a build: less than ``BUILD_TEST_LIMIT``."""

BUILD_TEST_LIMIT = 10 * LIMIT
"""Seconds that ``@pytest.mark.timeout`` gives the tests of a module that builds for minutes on a busy machine."""


def await_that(condition: Callable[[], bool], *, seconds: float = LIMIT, told: Callable[[], str] = lambda: "") -> None:
    """Return once the condition holds.

    Args:
        condition: What is awaited.
        seconds: Limit.
        told: Returns what the error says further.

    Raises:
        AssertionError: It did not hold in time.
    """
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s {told()}"
        time.sleep(0.001)


def join(*threads: threading.Thread) -> None:
    """Wait until threads have ended.

    Raises:
        AssertionError: One has not ended in time.
    """
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), f"{thread.name} has not ended within {LIMIT} s"


def num_threads() -> int:
    """Return how many threads the kernel counts in this process, native ones and those of libraries included."""
    return len(os.listdir("/proc/self/task"))


def assert_threads_end(expected: int) -> None:
    """Assert that soon no more than ``expected`` threads are left. The kernel lists a joined one for a moment longer.

    Raises:
        AssertionError: More are left.
    """
    await_that(
        lambda: num_threads() <= expected, seconds=10, told=lambda: f"{num_threads()} threads, {expected} expected"
    )


def lenient(seconds: float = 0.5, *, pauses: int = 20) -> float:
    """Return a deadline that unhindered work meets on this machine, however busy the machine is now.

    Args:
        seconds: The deadline on an idle machine. The default outlasts a burst of load that comes later.
        pauses: The deadline is at least this many times as long as a thread has to wait for a core now. A test that
            goes on when something else is late may pass fewer.

    Returns:
        Seconds, rounded to milliseconds if they are more than those given.
    """
    return max(seconds, round(pauses * _longest_pause(), 3))


def _longest_pause() -> float:
    """Compute for a few milliseconds and return the longest time, in seconds, for which the thread did not run."""
    longest, until = 0.0, time.thread_time() + 0.02
    last = time.monotonic()
    while time.thread_time() < until:
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest
