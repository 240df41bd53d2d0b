"""Jobs that a rank runs in the background, one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import takewhile

from lightning_smartinfinity.errors import CheckpointError, SmartInfinityError
from lightning_smartinfinity.zero3.ranks.watchdog import is_ending, lost_rank_behind

__all__ = ["BackgroundJobs"]


class BackgroundJobs:
    """Runs jobs in threads, in the order of their start. All methods except :meth:`pause` are called by one thread.

    Attributes:
        num_started: Number of jobs started so far.
    """

    def __init__(self) -> None:
        self.num_started = 0
        self._jobs: list[_Job] = []
        self._num_done = 0
        self._is_awaited = threading.Event()

    @property
    def any(self) -> bool:
        """Whether a job was started since the last :meth:`join`; the same on all ranks."""
        return bool(self._jobs)

    @property
    def num_done(self) -> int:
        """Number of jobs done so far; of those since the last :meth:`join`, only the ones before the first failure."""
        return self._num_done + sum(1 for _ in takewhile(lambda job: job.is_done, self._jobs))

    def start(self, work: Callable[[], None], *, after_success: bool = False) -> None:
        """Run a job after all earlier jobs have ended.

        Args:
            work: The job.
            after_success: Whether to skip the job if an earlier one since the last :meth:`join` failed.
        """
        job = _Job(work, list(self._jobs), after_success=after_success)
        self._jobs.append(job)
        self.num_started += 1
        try:
            job.start()
        except RuntimeError:  # no thread can be started
            self._is_awaited.set()
            try:
                job.run()
            finally:
                self._is_awaited.clear()

    def pause(self, seconds: float) -> None:
        """Pause the job for the training's sake, at most until a caller waits for the job; not if the training ends."""
        if not is_ending():
            self._is_awaited.wait(seconds)

    def take_failure(self) -> SmartInfinityError | None:
        """Return the first failure of a job that was not returned before, or None."""
        for job in self._jobs:
            if job.failure is not None and not job.is_told:
                job.is_told = True
                return job.failure
        return None

    def join(self) -> SmartInfinityError | None:
        """Wait until all jobs have ended, without pauses, and return the result of :meth:`take_failure`."""
        self._is_awaited.set()
        try:
            for job in self._jobs:
                job.join_if_alive()
        finally:
            self._is_awaited.clear()
        failure, self._num_done = self.take_failure(), self.num_done
        self._jobs.clear()
        return failure


class _Job(threading.Thread):
    def __init__(self, work: Callable[[], None], earlier: list[_Job], *, after_success: bool) -> None:
        super().__init__(name="smart-infinity-save", daemon=True)  # closing the state waits for it
        self._work: Callable[[], None] | None = work
        self._earlier = earlier
        self._after_success = after_success
        self._owner = os.getpid()
        self.failure: SmartInfinityError | None = None
        self.is_done = False
        self.is_told = False

    def run(self) -> None:
        """Run the job after the earlier ones."""
        for job in self._earlier:
            job.join_if_alive()
        work, self._work = self._work, None
        assert work is not None
        if self._after_success and any(job.failure is not None for job in self._earlier):
            return
        self._earlier = []
        try:
            work()
            self.is_done = True
        except SmartInfinityError as error:
            self.failure = error
        except Exception as error:
            self.failure = lost_rank_behind(error) or CheckpointError(
                f"A checkpoint could not be saved or removed in the background: {str(error) or type(error).__name__}.",
                "Check its folder and its disk, and save again. Earlier complete checkpoints are unchanged.",
            )

    def join_if_alive(self) -> None:
        """Wait until the job has ended, except in a forked child, which does not have its thread."""
        if self.is_alive() and self._owner == os.getpid():
            self.join()
