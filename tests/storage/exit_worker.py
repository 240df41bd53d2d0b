"""Gives a call up and ends: ``python -m tests.storage.exit_worker END LOG``.

END says how: ``returns``, a status, ``text`` (of a SystemExit), ``error``, ``interrupt``, ``thread`` (while a thread of
the user still works), ``late`` (nothing is given up before a late exit handler) or ``answered`` (the call has returned
by then). LOG is a file that is written and never closed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.storage.io import deadlines
from tests.helpers.waiting import await_that

answer, answering = os.pipe()


class Closes:
    """Waits for the disk when it is destroyed, as a file may."""

    read, write = staticmethod(os.read), staticmethod(os.write)  # the module is taken apart before

    def __init__(self, answer: int) -> None:
        self._answer = answer

    def __del__(self) -> None:
        self.read(self._answer, 1)
        self.write(1, b"destroyed\n")


def work() -> None:
    time.sleep(0.5)
    print("worked")


def give_up() -> None:
    with suppress(StorageTimeoutError):
        deadlines.in_time(
            lambda: os.read(answer, 1), doing="Reading", path=Path("/disk/file"), seconds=0.05, renews=False
        )


end, log = sys.argv[1:]
vars(sys)["closes"] = Closes(answer)  # Python destroys it in the end; what the call refers to stays anyway
atexit.register(print, "atexit")
file = open(log, "w")  # noqa: SIM115
file.write("written")
if end == "late":
    atexit.unregister(deadlines._exit_beside_unreturned)
    atexit.register(give_up)
    atexit.register(deadlines._exit_beside_unreturned)  # runs first
else:
    give_up()
if os.fork() == 0:
    print("the child has", deadlines._unreturned(), flush=True)
    os._exit(0)
os.wait()
if end == "answered":
    os.write(answering, b"12")
    await_that(lambda: not deadlines._unreturned())
elif end == "thread":
    threading.Thread(target=work).start()
elif end == "text":
    raise SystemExit("text")
elif end == "error":
    raise ValueError("wrong")
elif end == "interrupt":
    raise KeyboardInterrupt
elif end.isdigit():
    sys.exit(int(end))
