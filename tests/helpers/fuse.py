"""A file system that stops answering when it is asked to.

It passes all requests on to a folder, over the kernel's FUSE protocol, until :func:`hang` is called on a path
within it. Its server then stands still, as that of a network file system does whose network is gone, and ends after
:data:`SECONDS`, which releases what still waits for it. Needs the rights to mount, and no package.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

SECONDS = 150.0
"""For how long a file system hangs before it is gone."""

# Operations by their numbers in linux/fuse.h.
_OPERATIONS = (
    "LOOKUP FORGET GETATTR SETATTR _ _ _ _ MKDIR UNLINK RMDIR RENAME LINK OPEN READ WRITE STATFS RELEASE _ FSYNC"
    " _ _ _ _ FLUSH INIT OPENDIR READDIR RELEASEDIR FSYNCDIR _ _ _ _ CREATE INTERRUPT _ DESTROY _ _ _ BATCH_FORGET"
    " FALLOCATE _ RENAME2"
)
_NAMES = dict(enumerate(_OPERATIONS.split(), start=1))
_UNANSWERED = ("FORGET", "BATCH_FORGET", "INTERRUPT")
_ARMING = ".hang-"
_MAX_WRITE = 1 << 20
_FLAGS = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 18 | 1 << 22  # async reads, O_TRUNC, big writes, parallel look-ups, max_pages
_HEADER, _ANSWER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_SET_MODE, _SET_SIZE = 1, 8


def mount(source: Path, over: Path) -> int:
    """Mount a folder over another one, and start its server; return the server's process id."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40755,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(b"hanging", bytes(over), b"fuse", ctypes.c_ulong(0), options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    server = os.fork()
    if server == 0:
        os.closerange(0, 3)  # a reader of this process's output would wait for the server to end
        _Server(device, source).serve()
    os.close(device)
    return server


def why_no_fuse() -> str | None:
    """Return why there is no FUSE here; None if there is."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return None if os.geteuid() == 0 else "only root may mount"


def hang(within: Path, *, at: str, number: int = 1, keeps: bool = False) -> None:
    """Let a mounted file system stop answering.

    Args:
        within: Folder of the file system.
        at: Name of the operation, in capitals.
        number: Number of the request with this operation after which the file system stops.
        keeps: Whether that request itself is read and not answered. The kernel then lets no process end that waits
            for it. Otherwise it is the last one that is answered.
    """
    os.path.exists(within / f"{_ARMING}{at}-{number}-{int(keeps)}")


class _Server:
    """Answers the kernel's requests.

    Args:
        device: Descriptor of the mounted ``/dev/fuse``.
        source: Folder that the root stands for.
    """

    def __init__(self, device: int, source: Path) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._device = device
        self._nodes = {1: os.open(source, os.O_PATH)}
        self._numbers: dict[tuple[int, int], int] = {}
        self._at, self._left, self._keeps = "", 0, False

    def serve(self) -> NoReturn:
        """Answer until the file system is unmounted."""
        with suppress(OSError):
            while True:
                self._serve(os.read(self._device, _MAX_WRITE + (1 << 16)))
        os._exit(0)

    def _serve(self, request: bytes) -> None:
        _, number, unique, node, *_ = _HEADER.unpack_from(request)
        name = _NAMES.get(number, "?")
        self._left -= name == self._at
        stands = bool(self._at) and self._left <= 0
        if stands and self._keeps:
            _stand_still()
        if name not in _UNANSWERED:
            answer, error = b"", 0
            operation: Callable[[int, bytes], bytes] | None = getattr(self, f"_{name.lower()}", None)
            try:
                if operation is None:
                    raise OSError(errno.ENOSYS, "")
                answer = operation(node, request[_HEADER.size :])
            except OSError as failure:
                error = -(failure.errno or errno.EIO)
            os.write(self._device, _ANSWER.pack(_ANSWER.size + len(answer), error, unique) + answer)
        if stands:
            _stand_still()

    def _path(self, node: int) -> str:
        return f"/proc/self/fd/{self._nodes[node]}"

    def _entry(self, node: int, name: bytes) -> bytes:
        path = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[node])
        found = os.fstat(path)
        key = found.st_dev, found.st_ino
        number = self._numbers.setdefault(key, len(self._nodes) + 1)
        if number in self._nodes:
            os.close(path)
        self._nodes.setdefault(number, path)
        return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + _attributes(found)

    def _init(self, _: int, body: bytes) -> bytes:
        major, minor, ahead, flags = struct.unpack_from("<IIII", body)
        pages = _MAX_WRITE // os.sysconf("SC_PAGE_SIZE")
        return struct.pack(
            "<IIIIHHIIHHI28x", major, min(minor, 31), ahead, flags & _FLAGS, 16, 12, _MAX_WRITE, 1, pages, 0, 0
        )

    def _lookup(self, node: int, body: bytes) -> bytes:
        name = body.rstrip(b"\0")
        if name.startswith(_ARMING.encode()):
            at, number, keeps = name.decode().removeprefix(_ARMING).split("-")
            self._at, self._left, self._keeps = at, int(number), keeps == "1"
        return self._entry(node, name)

    def _getattr(self, node: int, _: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + _attributes(os.fstat(self._nodes[node]))

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, size, *_, mode, _, _, _, _ = struct.unpack("<I4xQQQQQQIIIIIIII", body)
        if valid & _SET_SIZE:
            os.truncate(self._path(node), size)
        if valid & _SET_MODE:
            os.chmod(self._path(node), stat.S_IMODE(mode))
        return self._getattr(node, b"")

    def _mkdir(self, node: int, body: bytes) -> bytes:
        mode, umask = struct.unpack_from("<II", body)
        name = body[8:].rstrip(b"\0")
        os.mkdir(name, mode & ~umask, dir_fd=self._nodes[node])
        return self._entry(node, name)

    def _unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(body.rstrip(b"\0"), dir_fd=self._nodes[node])
        return b""

    def _rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(body.rstrip(b"\0"), dir_fd=self._nodes[node])
        return b""

    def _rename(self, node: int, body: bytes) -> bytes:
        return self._renamed(node, struct.unpack_from("<Q", body)[0], 0, body[8:])

    def _rename2(self, node: int, body: bytes) -> bytes:
        new, flags = struct.unpack_from("<QI", body)
        return self._renamed(node, new, flags, body[16:])

    def _renamed(self, node: int, new: int, flags: int, names: bytes) -> bytes:
        before, after, *_ = names.split(b"\0")
        library = ctypes.CDLL(None, use_errno=True)
        if library.renameat2(self._nodes[node], before, self._nodes[new], after, flags):
            raise OSError(ctypes.get_errno(), "")
        return b""

    def _link(self, node: int, body: bytes) -> bytes:
        (old,) = struct.unpack_from("<Q", body)
        name = body[8:].rstrip(b"\0")
        os.link(self._path(old), name, dst_dir_fd=self._nodes[node], follow_symlinks=True)
        return self._entry(node, name)

    def _open(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        return _opened(os.open(self._path(node), flags & ~(os.O_NOFOLLOW | os.O_DIRECT | os.O_APPEND)))

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode, umask = struct.unpack_from("<III", body)
        name = body[16:].rstrip(b"\0")
        flags = flags & ~(os.O_DIRECT | os.O_APPEND) | os.O_CREAT
        descriptor = os.open(name, flags, mode & ~umask, dir_fd=self._nodes[node])
        return self._entry(node, name) + _opened(descriptor)

    def _read(self, _: int, body: bytes) -> bytes:
        descriptor, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(descriptor, size, offset)

    def _write(self, _: int, body: bytes) -> bytes:
        descriptor, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(descriptor, body[40 : 40 + size], offset), 0)

    def _statfs(self, node: int, _: bytes) -> bytes:
        found = os.statvfs(self._path(node))
        counts = found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree
        return struct.pack("<QQQQQIII28x", *counts, found.f_bsize, found.f_namemax, found.f_frsize)

    def _release(self, _: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _fsync(self, _: int, body: bytes) -> bytes:
        return b""

    _fsyncdir = _fsync

    _opendir, _releasedir = _open, _release

    def _readdir(self, _: int, body: bytes) -> bytes:
        descriptor, offset, size = struct.unpack_from("<QQI", body)
        answer = b""
        entries = sorted(os.scandir(descriptor), key=lambda entry: entry.name)
        for index, entry in enumerate(entries[offset:], offset + 1):
            name, kind = os.fsencode(entry.name), 4 if entry.is_dir(follow_symlinks=False) else 8
            packed = struct.pack("<QQII", entry.inode(), index, len(name), kind) + name
            packed += bytes(-len(packed) % 8)
            if len(answer) + len(packed) > size:
                break
            answer += packed
        return answer

    def _fallocate(self, _: int, body: bytes) -> bytes:
        descriptor, offset, length, mode = struct.unpack_from("<QQQI", body)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "")
        os.posix_fallocate(descriptor, offset, length)
        return b""


def _opened(descriptor: int) -> bytes:
    return struct.pack("<QII", descriptor, 0, 0)


def _attributes(found: os.stat_result) -> bytes:
    times = found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns
    return struct.pack(
        "<QQQQQQIIIIIIIIII",
        *(found.st_ino, found.st_size, found.st_blocks),
        *(time // 10**9 for time in times),
        *(time % 10**9 for time in times),
        *(found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev, found.st_blksize, 0),
    )


def _stand_still() -> NoReturn:
    time.sleep(SECONDS)
    os._exit(0)
