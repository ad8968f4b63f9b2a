"""Sandbox: runs Python that a model wrote, so that neither a mistake nor malice in it reaches the machine.

    with open_sandbox("isolated") as sandbox:
        outcome, = sandbox.run(["print(6 * 7)"])        # Outcome(kind="ok", stdout="42\\n", ...)

    python -m common.sandbox --check                    # what is protected here, line by line; also: --check unsafe, --check http://…

"isolated" (Linux 5.14 or newer, x86-64 or ARM64, as root or not) is a chain of processes, each with fewer rights than the one before:

    server    a new interpreter without threads or the caller's environment; imports numpy and sympy once
    keeper    one a worker: enters namespaces of its own (users, mounts, network, ipc, host name, cgroups, processes) and waits
    worker    process 1 in there; its root is a read-only tmpfs with Python's libraries and five devices; drains, times and judges
    program   a fork of the worker, made ahead of the call: process 1 of a process namespace of its own; user "nobody" where the caller is
              root; no capability, no new privileges, a seccomp filter, resource limits, an empty tmpfs at /tmp, three pipes

A program holds no way back: the worker judges it by exit status and clock, and what it prints is only ever data. When it ends, the
kernel ends all of its process namespace, and its /tmp is unmounted. Texts of programs and outputs pass through memory of the worker that
forks do not inherit. Random numbers of `random` and `numpy.random`, and the order of sets, are the same in every call.

Not covered: holes in the kernel, side channels such as timing, and the machine's load; memory is limited by process plus /tmp.
"unsafe" has the same limits, but no wall: for code you would run yourself. A URL is a SandboxFusion server (`POST /run_code`).
"""
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import linecache
import math
import mmap
import os
import platform
import queue
import random
import resource
import select
import shutil
import signal
import site
import socket
import stat
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import types
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from common import UserError


# Imported ahead of all programs: what they use most. numpy and sympy would import parts of themselves only when these are first used.
PACKAGES = ("numpy", "numpy.random", "numpy.linalg", "sympy", "itertools", "collections", "fractions", "decimal", "statistics", "datetime")


class SandboxDown(UserError):
    """No outcome could be had, for reasons outside the program: never shown to a model. A UserError, so no tool pool tries again."""


@dataclass(frozen=True)
class Limits:
    """What one program may use. Past wall_s or cpu_s the outcome is `timeout`, past memory_mb usually `memory`; the rest are OSErrors."""
    wall_s: float = 10.0  # seconds from the program's start, waiting for a free worker not counted
    cpu_s: int | None = None  # whole seconds of one process; None: wall_s and a little more, so that wall_s ends a program first
    memory_mb: int = 1024  # address space of one process, on top of the interpreter's own
    tasks: int = 32  # threads and processes together
    fork: bool = False  # may start processes (forks; never other programs), each with its own memory_mb and cpu_s
    tmp_mb: int = 32  # all files together
    files: int = 1000  # that exist at one time
    open_files: int = 64
    output_bytes: int = 1 << 16  # kept: the start of stdout, the end of stderr; 64 times as much ends the program (`killed`)
    source_bytes: int = 1 << 20  # longer programs are `refused`

    def __post_init__(self):
        for name, value in asdict(self).items():
            if name != "fork" and value is not None and not 0 < value < 1 << 30:
                raise UserError(f"the sandbox limit {name} must be above 0 and below {1 << 30:,}, not {value}")
        if self.cpu_s is None:
            object.__setattr__(self, "cpu_s", math.ceil(self.wall_s) + 1)
        if self.cpu_s != int(self.cpu_s):
            raise UserError(f"the sandbox limit cpu_s must be whole seconds, not {self.cpu_s}")


@dataclass(frozen=True)
class Outcome:
    """What became of one program.

    kind: ok | ok_empty (printed nothing) | error (an exception or exit status) | timeout | memory (an uncaught MemoryError) | killed (by a
    signal, or for endless output) | refused (never ran). Printing before an exception does not make it ok.
    """
    kind: str
    stdout: str = ""
    stderr: str = ""
    exception: str = ""  # the last line of stderr for error and memory, else a sentence saying what happened; empty for ok
    run_s: float = 0.0
    wait_s: float = 0.0  # for a free worker
    truncated: bool = False  # stdout or stderr were longer than output_bytes


# ---- Linux, by ctypes ---------------------------------------------------------------------------------------------------------------
NEW_NS, NEW_PID, NEW_USER, NEW_OTHERS = 0x20000, 0x20000000, 0x10000000, 0x4E000000  # others: network, ipc, host name, cgroup
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
ARCH = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table below, name in seccomp
CLONE, PIVOT_ROOT = (56, 220), (155, 41)
# System calls no program needs: what opens a socket, starts a program, changes the system, looks into others, or keeps memory or state that
# nobody would clear. (x86-64, ARM64), from asm/unistd_64.h and asm-generic/unistd.h.
DENIED = dict(
    mount=(165, 40), umount2=(166, 39), pivot_root=PIVOT_ROOT, chroot=(161, 51), unshare=(272, 97), setns=(308, 268), ptrace=(101, 117),
    process_vm_readv=(310, 270), process_vm_writev=(311, 271), kcmp=(312, 272), execve=(59, 221), execveat=(322, 281), socket=(41, 198),
    shmget=(29, 194), shmat=(30, 196), semget=(64, 190), msgget=(68, 186), mq_open=(240, 180), memfd_create=(319, 279),
    add_key=(248, 217), request_key=(249, 218), keyctl=(250, 219), bpf=(321, 280), perf_event_open=(298, 241), userfaultfd=(323, 282),
    fanotify_init=(300, 262), io_setup=(206, 0), vmsplice=(278, 75), name_to_handle_at=(303, 264), open_by_handle_at=(304, 265),
    personality=(135, 92), quotactl=(179, 60), acct=(163, 89), syslog=(103, 116), swapon=(167, 224), swapoff=(168, 225),
    reboot=(169, 142), sethostname=(170, 161), setdomainname=(171, 162), settimeofday=(164, 170), adjtimex=(159, 171),
    clock_settime=(227, 112), clock_adjtime=(305, 266), init_module=(175, 105), finit_module=(313, 273), delete_module=(176, 106),
    kexec_load=(246, 104), kexec_file_load=(320, 294), mknodat=(259, 33), mknod=(133, None), iopl=(172, None), ioperm=(173, None),
    modify_ldt=(154, None), uselib=(134, None), ustat=(136, None), sysfs=(139, None), _sysctl=(156, None))
FORKS = dict(fork=(57, None), vfork=(58, None))
NEWER = (436, 437, 439, 441, 449)  # from 424 on (same numbers everywhere) only close_range, openat2, faccessat2, epoll_pwait2, futex_waitv
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args) -> int:
    """A function of libc; OSError if it fails."""
    result = getattr(_libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def _filter(fork: bool) -> bytes:
    """The seccomp program. Calls that are denied fail with EPERM, newer ones with ENOSYS, which libraries know how to go around."""
    column, arch = ARCH[platform.machine()]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, eperm, enosys, kill = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
    op = lambda code, value, if_true=0, if_false=0: struct.pack("HBBI", code, if_true, if_false, value)
    numbers = [n[column] for n in {**DENIED, **({} if fork else FORKS)}.values() if n[column] is not None]
    code = [op(load, 4), op(equal, arch, 1, 0), op(give, kill), op(load, 0), op(at_least, 1 << 30, 0, 1), op(give, eperm)]  # x32 calls
    for n in numbers:
        code += [op(equal, n, 0, 1), op(give, eperm)]
    for n in NEWER:
        code += [op(equal, n, 0, 1), op(give, allow)]
    code += [op(at_least, 424, 0, 1), op(give, enosys), op(equal, CLONE[column], 1, 0), op(give, allow), op(load, 16)]  # clone's flags
    code += [op(any_bit, NEW_NS | NEW_PID | NEW_USER | NEW_OTHERS, 0, 1), op(give, eperm)]
    code += [] if fork else [op(any_bit, 0x10000, 1, 0), op(give, eperm)]  # threads only
    return b"".join(code + [op(give, allow)])


def _libraries(sites: list[str]) -> tuple[list[str], list[str], list[str]]:
    """(folders of libraries, package folders inside them to hide, imported packages to show again): all that programs see of the disk."""
    stdlib = sysconfig.get_path("stdlib")
    folders = {os.path.dirname(stdlib), os.path.dirname(sysconfig.get_path("platstdlib")), "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
    hidden = {f"{stdlib}/site-packages", "/usr/lib/python3/dist-packages"}
    shown = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        for folder in sites:
            if file.startswith(folder + "/"):
                top = file[len(folder) + 1:].split("/")[0]
                shown |= {f"{folder}/{name}" for name in (top, f"{top}.libs") if os.path.exists(f"{folder}/{name}")}
    hidden |= {s for s in sites if any(s.startswith(f + "/") for f in folders)}
    return sorted(filter(os.path.isdir, folders)), sorted(filter(os.path.isdir, hidden)), sorted(shown)


def _inside(path: str) -> str:
    """Where programs see a library folder: in its own place, unless a program's empty /tmp would cover it."""
    return "/libraries" + path if path.startswith("/tmp/") else path


def _confine(sites: list[str]) -> None:
    """Give this process a read-only root that holds libraries, five devices and an empty /tmp. Needs its own user and mount namespaces."""
    folders, hidden, shown = _libraries(sites)
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    sources = {path: os.open(path, os.O_PATH) for path in folders + shown + devices}  # held open: what follows may cover them
    tmpfs = lambda path, options: _call("mount", b"tmpfs", path.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    tmpfs("/tmp", b"size=1m,mode=755")
    for path in folders + hidden + shown + devices:
        target = "/tmp" + _inside(path)
        if path in hidden:
            tmpfs(target, b"size=1m,mode=755")
            continue
        if stat.S_ISDIR(os.fstat(sources[path]).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT))
        _call("mount", f"/proc/self/fd/{sources[path]}".encode(), target.encode(), None, MS_BIND | MS_REC, None)
    for fd in sources.values():
        os.close(fd)
    os.mkdir("/tmp/tmp")
    sys.path[:] = map(_inside, sys.path)
    for module in list(sys.modules.values()):  # where packages look for their data and for the parts that are not imported yet
        if isinstance(getattr(module, "__path__", None), list):
            module.__path__[:] = map(_inside, module.__path__)
        if isinstance(getattr(module, "__file__", None), str):
            module.__file__ = _inside(module.__file__)
    sys.path_importer_cache.clear()
    os.chdir("/tmp")
    _call("syscall", PIVOT_ROOT[ARCH[platform.machine()][0]], b".", b".")
    _call("umount2", b".", 2)  # the old root, which lies on top
    os.chdir("/")
    read_only = struct.pack("QQQQ", 1 | MS_NOSUID, 0, 0, 0)
    _call("syscall", 442, -100, b"/", 0x8000, read_only, len(read_only))  # mount_setattr, recursive
    for capability in range(64):
        with contextlib.suppress(OSError):
            _call("prctl", 24, capability, 0, 0, 0)  # out of the bounding set


# ---- the program's process ----------------------------------------------------------------------------------------------------------
OUT_OF_MEMORY = 86  # exit status; a program that chooses it for itself is called `memory`, too
NOBODY = 65534


def _resource_limits(limits: Limits, isolated: bool, base: int) -> list[tuple[int, int]]:
    """(resource, value). `base`: address space of the interpreter in bytes."""
    mb = 1 << 20
    wanted = {"CPU": limits.cpu_s, "AS": base + limits.memory_mb * mb, "FSIZE": limits.tmp_mb * mb, "NOFILE": limits.open_files, "CORE": 0}
    if isolated:  # elsewhere processes are counted by user, whatever else that user runs
        wanted |= {"NPROC": limits.tasks + 2, "MEMLOCK": 0, "MSGQUEUE": 0, "SIGPENDING": 256, "NICE": 0, "RTPRIO": 0}  # 2: keeper, worker
    pairs = [(getattr(resource, f"RLIMIT_{name}"), value) for name, value in wanted.items() if hasattr(resource, f"RLIMIT_{name}")]
    highest = {r: resource.getrlimit(r)[1] for r, _ in pairs}  # what this process may still set
    return [(r, v if highest[r] == resource.RLIM_INFINITY else min(v, highest[r])) for r, v in pairs]


def _seal(isolated: bool, resource_limits: list[tuple[int, int]], code: bytes) -> None:
    """Take everything from this process that a program must not have."""
    for which, value in resource_limits:
        try:
            resource.setrlimit(which, (value, value))
        except (ValueError, OSError):  # macOS refuses some
            if isolated:
                raise
    if isolated:
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        _call("prctl", 38, 1, 0, 0, 0)  # no new privileges
        _call("capset", struct.pack("II", 0x20080522, 0), bytes(24))
        _call("prctl", 4, 0, 0, 0, 0)  # not dumpable: nobody traces it
        buffer = ctypes.create_string_buffer(code, len(code))
        _call("prctl", 22, 2, struct.pack("HP", len(code) // 8, ctypes.addressof(buffer)), 0, 0)


def _program(folder: str) -> int:
    """Read a program from descriptor 0, run it as __main__ in `folder`, and return its exit status."""
    os.chdir(folder)
    random.seed(0)
    parts = []
    while part := os.read(0, 1 << 16):
        parts.append(part)
    empty = os.open("/dev/null", os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    source = b"".join(parts)
    lines = source.decode("utf-8", "replace").splitlines(True)
    linecache.cache["program.py"] = (len(source), None, lines, "program.py")  # so that tracebacks show the line
    status = 0
    try:
        exec(compile(source, "program.py", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
    except SystemExit as end:
        status = 0 if end.code is None else end.code & 0xFF if isinstance(end.code, int) else 1
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        status = OUT_OF_MEMORY if isinstance(error, MemoryError) else 1
        try:
            traceback.print_exception(type(error), error, error.__traceback__.tb_next, file=sys.stderr)
        except BaseException:
            os.write(2, f"{type(error).__name__}\n".encode())
    try:
        threading._shutdown()  # waits for its threads, as the interpreter does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        status = status or 120
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
    return status


# ---- the worker ---------------------------------------------------------------------------------------------------------------------
REPLY = struct.Struct("!BidII?")  # why it was ended, wait status, run_s, bytes of stdout, of stderr, truncated
ITSELF, WALL, CPU, OUTPUT = range(4)


@dataclass
class _Child:
    pid: int
    source: int  # descriptors: write end of the program's text, read ends of its output
    out: int
    err: int
    folder: str


def _fork_program(config: dict, limits: Limits, namespace: int | None) -> _Child:
    folder = "/tmp"
    if config["isolated"]:
        owner = NOBODY if os.getuid() == 0 else os.getuid()
        options = f"size={limits.tmp_mb}m,nr_inodes={limits.files + 1},mode=700,uid={owner},gid={owner}"
        _call("mount", b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options.encode())
        _call("setns", namespace, NEW_PID)  # back to the worker's own, else the next would lie inside the last
        _call("unshare", NEW_PID)
    else:
        folder = tempfile.mkdtemp(prefix="sandbox-")
    (text, source), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for fd, target in ((text, 0), (stdout, 1), (stderr, 2)):
                os.dup2(fd, target)
            os.closerange(3, 1024)  # the server and the worker hold few, and new ones get the lowest numbers
            if not config["isolated"]:
                os.setpgid(0, 0)
                os.environ.update(HOME=folder, TMPDIR=folder)
                tempfile.tempdir = folder
            _seal(config["isolated"], config["resources"], config["filter"])
            os._exit(_program(folder))
        except BaseException as error:  # not the program's, which has not begun
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    for fd in (text, stdout, stderr):
        os.close(fd)
    return _Child(pid, source, out, err, folder)


def _work(sock: socket.socket, config: dict, limits: Limits, namespace: int | None) -> None:
    """Serve one program after the other until the caller hangs up."""
    cap = limits.output_bytes
    shared = mmap.mmap(-1, 4 + limits.source_bytes + 2 * cap + (1 << 16))
    if hasattr(mmap, "MADV_DONTFORK"):
        shared.madvise(mmap.MADV_DONTFORK)  # no program finds another's text or output in memory
    view = memoryview(shared)
    head, text, rest = view[:4], view[4:4 + limits.source_bytes], view[4 + limits.source_bytes:]
    while True:
        child = _fork_program(config, limits, namespace)  # ahead of the call, so that the call need not wait for it
        gone = not _receive(sock, head)
        if not gone:
            length = int.from_bytes(head, "big")
            gone = not _receive(sock, text[:length])
        started = time.monotonic()
        if not gone:
            with contextlib.suppress(BrokenPipeError):  # it died while it was waiting; its exit status says how
                sent = 0
                while sent < length:  # it reads everything before it runs anything, so this cannot hang
                    sent += os.write(child.source, text[sent:length])
        os.close(child.source)
        reply, out, err = _supervise(child, rest, sock, limits, started, gone, config["isolated"])
        if config["isolated"]:
            _call("umount2", b"/tmp", 2)
        else:
            shutil.rmtree(child.folder, ignore_errors=True)
        if reply is None:
            return
        for part in (reply, out, err):
            if len(part):  # the caller does not wait for nothing, and may have hung up
                sock.sendall(part)


def _supervise(child: _Child, room: memoryview, sock: socket.socket, limits: Limits, started: float, gone: bool, isolated: bool):
    """Drain, time and end a program. (reply, stdout, stderr); the reply is None where the caller has gone."""
    cap = limits.output_bytes
    kept, scratch = {child.out: room[:cap], child.err: room[cap:2 * cap]}, room[2 * cap:]
    used, total, cut, why = {child.out: 0, child.err: 0}, 0, False, ITSELF
    poll = select.poll()
    pidfd = -1
    with contextlib.suppress(AttributeError, OSError):  # macOS, old or locked kernels: asked every 5 ms instead
        pidfd = os.pidfd_open(child.pid)
    for fd in (child.out, child.err, *([pidfd] if pidfd >= 0 else [])):
        poll.register(fd, select.POLLIN)
    poll.register(sock, getattr(select, "POLLRDHUP", select.POLLHUP))

    def drain(fd: int) -> int:
        nonlocal total, cut
        space = kept[fd][used[fd]:]
        if not space and fd == child.err:  # keeps the end of stderr, where the exception stands
            half = cap // 2
            kept[fd][:cap - half] = kept[fd][half:]
            used[fd], cut = cap - half, True
            space = kept[fd][used[fd]:]
        n = os.readv(fd, [space or scratch])
        cut |= not space and n > 0
        used[fd] += n if space else 0
        total += n
        return n

    status = usage = None
    while not gone and why == ITSELF and status is None:
        left = started + limits.wall_s - time.monotonic()
        if left <= 0:
            why = WALL
        for fd, _ in poll.poll(max(0, math.ceil(1000 * (left if pidfd >= 0 else min(left, 0.005))))) if left > 0 else ():
            if fd == sock.fileno():
                gone = True
            elif fd != pidfd and drain(fd) == 0:
                poll.unregister(fd)
        pid, ended, spent = os.wait4(child.pid, os.WNOHANG)
        if pid:
            status, usage = ended, spent
        elif total > 64 * cap:
            why = OUTPUT
    if not isolated:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # also what it left behind in its process group
    if status is None:
        os.kill(child.pid, signal.SIGKILL)
        _, status, usage = os.wait4(child.pid, 0)  # returns when all of its process namespace has gone
    for fd in (child.out, child.err):
        os.set_blocking(fd, False)
        with contextlib.suppress(BlockingIOError):
            while total <= 65 * cap and drain(fd):
                pass
        os.close(fd)
    if pidfd >= 0:
        os.close(pidfd)
    by_kernel = why == ITSELF and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if by_kernel and usage.ru_utime + usage.ru_stime > limits.cpu_s - 0.1:
        why = CPU
    reply = REPLY.pack(why, status, time.monotonic() - started, used[child.out], used[child.err], cut)
    return None if gone else reply, kept[child.out][:used[child.out]], kept[child.err][:used[child.err]]


def _receive(sock: socket.socket, view: memoryview) -> bool:
    """Fill `view`; False if the other side hangs up first."""
    filled = 0
    while filled < len(view):
        n = sock.recv_into(view[filled:])
        if n == 0:
            return False
        filled += n
    return True


def _furnish() -> None:
    """Make the interpreter look as a program expects it. Done once, before the forks: every page a fork writes to is copied."""
    site.setquit(), site.sethelper(), site.setcopyright()  # exit() and friends, without site's search for packages
    for name in [n for n in sys.modules if n.partition(".")[0] == "common"]:
        del sys.modules[name]
    sys.path.insert(0, "")
    sys.argv[:] = ["program.py"]
    sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, encoding="utf-8", errors=errors, closefd=False) for fd, mode, errors in
                                         ((0, "r", "surrogateescape"), (1, "w", "strict"), (2, "w", "backslashreplace")))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(0)
    sys.modules["__main__"] = types.ModuleType("__main__")


def _huge_pages() -> None:
    """Gather this process's memory in huge pages where Linux (6.1 or newer) can: halves the time of a fork."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, rights, *_, name = line.split() + [""] * (len(line.split()) < 6)
            first, end = (int(a, 16) >> 21 for a in span.split("-"))
            if rights == "rw-p" and name in ("", "[heap]") and end > first + 1:
                _libc.madvise(ctypes.c_void_p((first + 1) << 21), ctypes.c_size_t((end - first - 1) << 21), 25)  # MADV_COLLAPSE


# ---- the server ---------------------------------------------------------------------------------------------------------------------
def _serve(control: socket.socket, config: dict) -> None:
    """For every socket that comes over `control`, start a worker that serves it. Ends, with all workers, when `control` closes."""
    for name in config["packages"]:
        importlib.import_module(name)
    if "sympy" in config["packages"]:
        exec("import sympy; x = sympy.Symbol('x'); sympy.integrate(sympy.sin(x), x); sympy.solve(sympy.expand((x + 1) ** 2) - 3, x)", {})
    _furnish()
    limits = Limits(**config["limits"])
    config["filter"] = _filter(limits.fork) if config["isolated"] else b""
    base = 1 << 40  # where nobody says how much the interpreter takes
    with contextlib.suppress(OSError):
        base = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE + 4 * limits.output_bytes + limits.source_bytes
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, programs go first
    config["resources"] = _resource_limits(limits, config["isolated"], base)
    gc.collect()
    gc.freeze()
    _huge_pages()
    control.sendall(b"\0")
    while True:
        data, descriptors, *_ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        sock = socket.socket(fileno=descriptors[0])
        ask, answer = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                control.close(), ask.close()
                namespace = _keeper(sock, answer, config["sites"]) if config["isolated"] else answer.close()
            except OSError as error:
                sock.sendall(f"{error.strerror or error}".encode())
                os._exit(0)
            try:
                sock.sendall(b"\0")
                _work(sock, config, limits, namespace)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        sock.close(), answer.close()
        if ask.recv(1):  # it has a user namespace now, and only somebody outside may say who is who in there
            root = os.getuid() == 0
            maps = {"uid_map": os.geteuid(), "gid_map": os.getegid()}
            if not root:
                with contextlib.suppress(OSError):
                    Path(f"/proc/{pid}/setgroups").write_text("deny")
            for name, own in maps.items():
                for text in ([f"0 0 1\n{NOBODY} {NOBODY} 1\n"] if root else []) + [f"{NOBODY} {own} 1\n"]:
                    with contextlib.suppress(OSError):
                        Path(f"/proc/{pid}/{name}").write_text(text)
                        break
            ask.sendall(b"\0")
        ask.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _keeper(sock: socket.socket, answer: socket.socket, sites: list[str]) -> int:
    """Enter new namespaces and fork the worker as process 1 of them, which returns; this process waits for its end."""
    _call("unshare", NEW_USER)
    answer.sendall(b"\0")
    answer.recv(1)
    answer.close()
    _call("unshare", NEW_NS | NEW_PID | NEW_OTHERS)
    _call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # ends with the server
    pid = os.fork()
    if pid:
        sock.close()
        os.waitpid(pid, 0)
        os._exit(0)
    _call("prctl", 1, signal.SIGKILL, 0, 0, 0)
    namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
    _confine(sites)
    return namespace


# ---- the caller's side --------------------------------------------------------------------------------------------------------------
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from common import sandbox; sandbox._start()"
OTHERWISE = ("give a SandboxFusion server's address, or choose 'unsafe', which limits time and memory but protects neither files, "
             "environment, network nor processes")
MEND = ("on Ubuntu 24.04 and newer `sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0` allows it, in Docker "
        "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined`; or " + OTHERWISE)


def _start() -> None:
    """What the server's process runs."""
    config = json.loads(sys.argv[2])
    os.umask(0o22)
    sys.path[:] = [p for p in sys.path if p != sys.argv[1]] + config["sites"]
    control = socket.socket(fileno=config["control"])
    try:
        _serve(control, config)
    except ImportError as error:
        control.sendall(f"{error}".encode())


class _Backend:
    """What the two backends share: programs run side by side, results in order."""

    def __init__(self, limits: Limits, workers: int):
        if workers < 1:
            raise UserError(f"the sandbox needs at least one worker, not {workers}")
        self.limits, self.workers = limits, workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")

    def run(self, programs: list[str]) -> list[Outcome]:
        """One Outcome a program, in order. May be called from several threads. Raises SandboxDown if there is none to be had."""
        if isinstance(programs, str):
            raise TypeError("run() takes a list of programs, not one text")
        return list(self._pool.map(self._run, programs, [time.monotonic()] * len(programs)))

    def _run(self, program: str, queued: float) -> Outcome:
        wait_s = time.monotonic() - queued
        try:
            text = program.encode()
        except UnicodeEncodeError as error:
            return Outcome("refused", exception=f"the program holds a character that no file can (position {error.start})", wait_s=wait_s)
        if len(text) > self.limits.source_bytes:
            reason = f"the program has {len(text):,} bytes; at most {self.limits.source_bytes:,} are run"
            return Outcome("refused", exception=reason, wait_s=wait_s)
        return self._attempt(text, wait_s)

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class LocalSandbox(_Backend):
    """"isolated" and "unsafe", see above. Made by open_sandbox."""

    def __init__(self, isolated: bool, limits: Limits, workers: int, packages: tuple[str, ...]):
        super().__init__(limits, workers)
        self.isolated = isolated
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        sites = [p for p in dict.fromkeys(map(os.path.realpath, sys.path)) if p.endswith(("site-packages", "dist-packages"))]
        config = dict(isolated=isolated, limits=asdict(limits), packages=packages, sites=sites, control=theirs.fileno())
        # nothing of the caller's, and no threads, since it forks
        environment = dict(PATH="/usr/bin:/bin", LANG="C.UTF-8", PYTHONHASHSEED="0", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1",
                           MKL_NUM_THREADS="1", MALLOC_ARENA_MAX="2", HOME="/tmp", TMPDIR="/tmp")
        project = str(Path(__file__).resolve().parent.parent)
        command = [sys.executable, "-sSPB", "-X", "utf8", "-c", _BOOT, project, json.dumps(config)]
        self._server = subprocess.Popen(command, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self._idle: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()  # None: a place whose worker has to be started
        try:
            self._hello(self._control, 60, "the sandbox cannot import what programs may use ({}): install it or leave it out of `packages`")
            for _ in range(workers):
                self._idle.put(self._worker())
        except BaseException:
            self.close()
            raise

    def _hello(self, sock: socket.socket, seconds: float, problem: str) -> None:
        sock.settimeout(seconds)
        try:
            said = sock.recv(4096)
        except OSError as error:
            raise SandboxDown(f"the sandbox did not start within {seconds:g} s ({error}); the machine may be too busy") from error
        if not said:
            raise SandboxDown("the sandbox ended while it was starting; its last words are above")
        if said != b"\0":
            raise UserError(problem.format(said.decode("utf-8", "replace")))

    def _worker(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            with self._lock, theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            self._hello(ours, 30, "programs cannot be isolated here ({}): " + MEND)
        except OSError as error:
            ours.close()
            raise SandboxDown(f"the sandbox's server has ended ({error}); start the run again") from error
        except BaseException:
            ours.close()
            raise
        ours.settimeout(self.limits.wall_s + 30)
        return ours

    def _attempt(self, text: bytes, wait_s: float) -> Outcome:
        started = time.monotonic()
        for attempt in (1, 2):
            sock = self._idle.get()
            try:
                sock = sock or self._worker()
                wait_s, started = wait_s + time.monotonic() - started, time.monotonic()
                sock.sendall(len(text).to_bytes(4, "big") + text)
                why, status, run_s, *lengths, cut = REPLY.unpack(self._receive(sock, REPLY.size))
                out, err = (self._receive(sock, n).decode("utf-8", "replace") for n in lengths)
                break
            except OSError as error:  # the worker has gone or is stuck; the next one that is needed is started anew
                if sock:
                    sock.close()
                sock = None
                if attempt == 2:
                    if self._server.poll() is not None:  # its workers went with it
                        raise SandboxDown(f"the sandbox's server has ended ({error}); start the run again") from error
                    raise SandboxDown(f"the sandbox lost two workers over one program ({error}); is the machine out of memory?") from error
            finally:
                self._idle.put(sock if sock and sock.fileno() >= 0 else None)
        return self._judge(why, status, out, err, run_s, wait_s, cut)

    @staticmethod
    def _receive(sock: socket.socket, n: int) -> bytes:
        buffer = bytearray(n)
        if not _receive(sock, memoryview(buffer)):
            raise ConnectionError("it hung up")
        return bytes(buffer)

    def _judge(self, why: int, status: int, out: str, err: str, run_s: float, wait_s: float, cut: bool) -> Outcome:
        give = lambda kind, exception="": Outcome(kind, out, err, exception, run_s, wait_s, cut)
        if why == WALL:
            return give("timeout", f"the program ran longer than {self.limits.wall_s:g} s")
        if why == CPU:
            return give("timeout", f"the program used more than {self.limits.cpu_s} s of processor time")
        if why == OUTPUT:
            return give("killed", f"the program printed more than {64 * self.limits.output_bytes:,} bytes")
        if os.WIFSIGNALED(status):
            names = {s.value: s.name for s in signal.Signals}
            return give("killed", f"the program was ended by signal {names.get(os.WTERMSIG(status), os.WTERMSIG(status))}")
        return _ended(os.WEXITSTATUS(status), out, err, give)

    def close(self) -> None:
        """End the server and everything it started; waits for programs that run."""
        super().close()
        while hasattr(self, "_idle") and not self._idle.empty():
            if sock := self._idle.get():
                sock.close()
        self._control.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def _ended(code: int, out: str, err: str, give) -> Outcome:
    if code == 0:
        return give("ok" if out.strip() else "ok_empty")
    last = next((line for line in reversed(err.splitlines()) if line.strip()), f"exit status {code}")
    return give("memory" if code == OUT_OF_MEMORY else "error", last)


class HttpSandbox(_Backend):
    """A SandboxFusion server (spec: bytedance/SandboxFusion, `sandbox/server`). Only what is not the program's doing is tried again."""
    ATTEMPTS = 3

    def __init__(self, url: str, limits: Limits, workers: int):
        super().__init__(limits, workers)
        self.url = url.rstrip("/")
        self.url += "" if self.url.endswith("/run_code") else "/run_code"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def _attempt(self, text: bytes, wait_s: float) -> Outcome:
        body = json.dumps(dict(code=text.decode(), language="python", compile_timeout=self.limits.wall_s, run_timeout=self.limits.wall_s,
                               memory_limit_MB=self.limits.memory_mb, stdin="", files={}, fetch_files=[])).encode()
        reason = ""
        for attempt in range(self.ATTEMPTS):
            if attempt:
                time.sleep(0.2 * 4 ** (attempt - 1))
            started = time.monotonic()
            try:
                request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
                with self._open(request, timeout=self.limits.wall_s + 5) as response:
                    answer = json.loads(response.read(64 << 20))
                if answer["status"] in ("Success", "Failed"):
                    return self._judge(answer["run_result"], time.monotonic() - started, wait_s)
                reason = f"{answer['status']}: {answer.get('message')}"
            except urllib.error.HTTPError as error:
                reason = f"HTTP status {error.code}"
                if error.code < 500:
                    break
            except Exception as error:  # no connection, not HTTP, not JSON, not what the protocol says
                reason = f"{type(error).__name__}: {error}"
        raise SandboxDown(f"the SandboxFusion server {self.url} gave no result ({ascii(reason)[1:-1][:200]}); check address and server")

    def _judge(self, result: dict, took_s: float, wait_s: float) -> Outcome:
        cap = self.limits.output_bytes
        whole_out, whole_err = (result.get(k) or "" for k in ("stdout", "stderr"))
        out, err = whole_out[:cap], whole_err[-cap:]
        seconds = result.get("execution_time")
        give = lambda kind, exception="": Outcome(kind, out, err, exception, took_s if seconds is None else float(seconds), wait_s,
                                                  out != whole_out or err != whole_err)
        if result["status"] == "TimeLimitExceeded":
            return give("timeout", f"the program ran longer than {self.limits.wall_s:g} s")
        code = result["return_code"]
        if result["status"] != "Finished" or type(code) is not int:
            raise ValueError(f"an answer with status {result['status']!r} and return code {code!r}")
        if code < 0 or code == 137:
            return give("killed", f"the program was ended by signal {-code if code < 0 else 9}")
        outcome = _ended(code, out, err, give)
        memory = outcome.kind == "error" and outcome.exception.startswith(("MemoryError", "numpy._core._exceptions._ArrayMemoryError"))
        return give("memory", outcome.exception) if memory else outcome


Sandbox = LocalSandbox | HttpSandbox


def open_sandbox(where: str = "isolated", limits: Limits = Limits(), workers: int | None = None,
                 packages: tuple[str, ...] = PACKAGES) -> Sandbox:
    """A sandbox that has run a few known programs. `where`: "isolated", "unsafe" or a SandboxFusion address.

    workers: programs at one time, by default the cores this process may use, shared with the other ranks on this machine. packages: imported
    ahead of all programs (local ones only).
    Raises UserError where isolation is impossible, SandboxDown where the known programs come out wrong.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = workers or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # as ranks.on_this_machine(), which would import torch
    if where.startswith(("http://", "https://")):
        sandbox = HttpSandbox(where, limits, workers)
    elif where not in ("isolated", "unsafe"):
        raise UserError(f"there is no sandbox {where!r}; choose 'isolated', 'unsafe' or the http:// address of a SandboxFusion server")
    else:
        if where == "isolated":
            _require_linux()
        sandbox = LocalSandbox(where == "isolated", limits, workers, packages)
    try:
        known = KNOWN + (WALLS if where == "isolated" else ())
        for probe, outcome in zip(known, sandbox.run([p.program for p in known])):
            if not probe.holds(outcome):
                raise SandboxDown(f"the sandbox {where} failed its self-test '{probe.name}': {ascii(outcome)[:300]}")
    except BaseException:
        sandbox.close()
        raise
    return sandbox


def _require_linux() -> None:
    release = tuple(int(n) for n in platform.release().split("-")[0].split(".")[:2] if n.isdigit())
    if sys.platform != "linux" or platform.machine() not in ARCH or release < (5, 14):
        here = f"{platform.system()} {platform.release()} {platform.machine()}"
        raise UserError(f"programs cannot be isolated on {here}, only on Linux 5.14 or newer on x86-64 or ARM64; {OTHERWISE}")


# ---- the contract -------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Probe:
    """A program and what must become of it: one of `kinds`, and exactly `stdout` unless that is None."""
    name: str
    program: str
    kinds: tuple[str, ...]
    stdout: str | None = None

    def holds(self, outcome: Outcome) -> bool:
        return outcome.kind in self.kinds and self.stdout in (None, outcome.stdout)


def _wall(name: str, *attacks: str) -> Probe:
    """Every attack is a piece of Python that raises an exception where it is held off."""
    lines = "".join(f"try:\n    {a}\n    print('reached')\nexcept Exception as e:\n    print('held')\n" for a in attacks)
    start = ("import ctypes, os, socket, sys\nlibc = ctypes.CDLL(None, use_errno=True)\ndef must(x):\n    assert x\n"
             "def allowed(result):\n    must(ctypes.get_errno() not in (1, 38))\n")  # EPERM, ENOSYS: asked for what cannot work anyway
    return Probe(name, start + lines, ("ok",), "held\n" * len(attacks))


KNOWN = (Probe("prints", "print(6 * 7)", ("ok",), "42\n"),
         Probe("prints nothing", "x = 1", ("ok_empty",), ""),
         Probe("exception after printing", "print(1)\n1 / 0", ("error",), "1\n"),
         Probe("exit status", "import sys; sys.exit(3)", ("error",), ""))
_PROJECT = str(Path(__file__).resolve())
WALLS = (_wall("files of the project", f"open({_PROJECT!r})"), _wall("network", "socket.create_connection(('127.0.0.1', 9), 0.2)",
         "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('198.51.100.1', 9))"))


def _contract(pid: int) -> tuple[Probe, ...]:
    """All probes, for a caller with process number `pid` whose environment holds SANDBOX_CANARY."""
    home = os.path.expanduser("~")
    return (*KNOWN, *WALLS,
            Probe("input() ends", "input()", ("error",), ""),
            Probe("endless loop ends", "while True: pass", ("timeout",), ""),
            Probe("endless sleep ends, signals held off", "import signal, time\nfor s in range(1, 65):\n    try:\n"
                  "        signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\ntime.sleep(1000)", ("timeout",), ""),
            Probe("endless output ends", "while True: print('x' * 10000)", ("killed", "timeout")),
            Probe("memory", "x = bytearray(3 << 30)", ("memory", "killed"), ""),
            _wall("home and system files", f"must([e for e in os.scandir({home!r}) if e.is_file()])", "open('/etc/passwd')",
                  "must(os.listdir('/var'))"),
            _wall("environment", "os.environ['SANDBOX_CANARY']"),
            _wall("other processes", f"os.kill({pid}, 0)", f"open('/proc/{pid}/stat')", "allowed(libc.ptrace(16, 1 << 23, 0, 0))"),
            _wall("writing outside its folder", *(f"open({p + '/.probe'!r}, 'x').close(); os.remove({p + '/.probe'!r})"
                                                   for p in ("", home, "/usr/lib", os.path.dirname(_PROJECT)))),
            _wall("file size", "open('big', 'wb').truncate(1 << 31)"),
            _wall("number of files", "[open(f'{i}', 'w').close() for i in range(3000)]"),
            _wall("open files", "x = [os.open('/dev/null', 0) for i in range(3000)]"),
            _wall("threads", "import threading, time; [threading.Thread(target=time.sleep, args=(0.5,)).start() for i in range(500)]"),
            _wall("processes", "for i in range(200): os.fork() or (__import__('time').sleep(3), os._exit(0))"),
            _wall("starting other programs", "os.execv('/bin/sh', ['sh', '-c', 'echo reached'])",
                  "__import__('subprocess').run([sys.executable, '-c', ''], check=True)"),
            _wall("becoming root", "os.setuid(0); must(os.getuid() == 0)", "os.chroot('/none')", "allowed(libc.umount2(b'/none', 0))",
                  "allowed(libc.unshare(0x10000000))"),
            _wall("devices and kernel", "must([d for d in os.listdir('/dev') if d not in ('null', 'zero', 'full', 'random', 'urandom')])",
                  "must(os.listdir('/sys'))", "must(os.listdir('/proc/sys'))"))


LEAVE = "import json, pathlib\npathlib.Path('left').write_text('x')\njson.left = 1\nprint('left')"
FIND = _wall("what the last call left", "open('left')", "__import__('json').left")


def check(sandbox: LocalSandbox | HttpSandbox, write=print) -> int:
    """Write a line for every part of the contract, and return how many are not protected."""
    probes = _contract(os.getpid())
    outcomes = sandbox.run([p.program for p in probes])
    sandbox.run([LEAVE] * 2 * sandbox.workers)
    found = sandbox.run([FIND.program] * 2 * sandbox.workers)
    results = [(p.name, p.holds(o), o) for p, o in zip(probes, outcomes)]
    results.append((FIND.name, all(map(FIND.holds, found)), found[0]))
    for name, held, outcome in results:
        detail = "" if held else f"  ({outcome.kind}: {ascii(outcome.exception or outcome.stdout)[:80]})"
        write(f"{'protected' if held else 'not protected':14} {name}{detail}")
    return sum(not held for _, held, _ in results)


def main(args: list[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else args
    if not args or args[0] != "--check" or len(args) > 2:
        print("usage: python -m common.sandbox --check [isolated | unsafe | http://host:port]", file=sys.stderr)
        return 2
    where = args[1] if len(args) == 2 else "isolated"
    os.environ["SANDBOX_CANARY"] = "1"  # something no program may see
    try:
        with open_sandbox(where, Limits(wall_s=3, cpu_s=1, memory_mb=512)) as sandbox:
            failed = check(sandbox)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{failed} not protected" if failed else "everything is protected")
    return int(failed > 0 and where != "unsafe")


if __name__ == "__main__":
    sys.exit(main())
