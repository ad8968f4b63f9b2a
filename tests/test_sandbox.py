"""Hostile programs, none of which may succeed; what becomes of ordinary ones; the HTTP backend against a small server."""
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from common import UserError, sandbox
from common.sandbox import Limits, Outcome, SandboxDown, open_sandbox

PROJECT = Path(sandbox.__file__).resolve().parent.parent
QUICK = Limits(wall_s=2.5, cpu_s=1, memory_mb=128, open_files=32, files=200, tmp_mb=8)
SECRET = "canary-7d1f"


def descendants() -> list[int]:
    """Processes below this one, and those of the sandbox that have lost their parent."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [os.getpid()]
    for pid in found:
        found += [p for p, parent in parents.items() if parent == pid]
    return found[1:]


def skip_without_namespaces(error: UserError) -> None:
    """Skip where the kernel refuses namespaces to anybody; where it grants them, a sandbox that does not open is broken."""
    granted = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "true"], capture_output=True)
    if isinstance(error, SandboxDown) or granted.returncode == 0:
        raise error
    pytest.skip(f"no isolation on this machine: {error}")


@pytest.fixture(scope="module")
def box():
    os.environ["SANDBOX_SECRET"] = SECRET
    try:
        with open_sandbox("isolated", QUICK, workers=2) as opened:
            yield opened
    except UserError as error:
        skip_without_namespaces(error)
    finally:
        del os.environ["SANDBOX_SECRET"]


@pytest.fixture(scope="module")
def forking():
    try:
        with open_sandbox("isolated", Limits(wall_s=1.0, cpu_s=1, memory_mb=256, tasks=16, fork=True), workers=1) as opened:
            yield opened
    except UserError as error:
        skip_without_namespaces(error)


def one(box, program: str) -> Outcome:
    return box.run([program])[0]


@pytest.mark.parametrize("ranks, given, workers", [(None, None, 8), (3, None, 2), (16, None, 1), (3, 5, 5)])
def test_ranks_on_one_machine_share_its_cores(monkeypatch, ranks, given, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks)) if ranks else monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def opened(isolated, limits, workers, packages):
        raise UserError(f"{workers} workers")

    monkeypatch.setattr(sandbox, "LocalSandbox", opened)
    with pytest.raises(UserError, match=f"^{workers} workers"):
        open_sandbox("unsafe", workers=given)


# ---- programs that try something and say how it went --------------------------------------------------------------------------------
# Each prints REACHED if it succeeds, the exception's name if it is held off.
TRY = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "denied")
try:
    {}
    print("REACHED")
except BaseException as error:
    print(type(error).__name__)
"""
DENIED, ABSENT = ("PermissionError",), ("FileNotFoundError",)
READ_ONLY = ("OSError",)
NO_SUCH = ("ProcessLookupError",)
ATTEMPTS = {
    "read the home folder's files": ("assert [e for e in os.scandir({home!r}) if e.is_file()]", ("AssertionError", "FileNotFoundError")),
    "read an SSH key": ("open({home!r} + '/.ssh/id_rsa')", ABSENT),
    "read /etc/passwd": ("open('/etc/passwd')", ABSENT),
    "read the repository": ("open({project!r} + '/README.md')", ABSENT),
    "list the repository": ("assert set(os.listdir({project!r})) - {{'.venv'}}", ("AssertionError", "FileNotFoundError")),
    "read the caller's environment": ("os.environ['SANDBOX_SECRET']", ("KeyError",)),
    "read the environment by libc": ("libc.getenv.restype = ctypes.c_char_p; libc.getenv(b'SANDBOX_SECRET').decode()", ("AttributeError",)),
    "read another process's environment": ("open('/proc/{pid}/environ')", ABSENT),
    "read its own process's memory map": ("open('/proc/self/maps')", ABSENT),
    "mount /proc": ("check(libc.mount(b'proc', b'/tmp', b'proc', 0, None))", DENIED),
    "see another process": ("os.kill({pid}, 0)", NO_SUCH),
    "kill the caller": ("os.kill({pid}, 9)", NO_SUCH),
    "kill the parent": ("assert os.getppid() > 0; os.kill(os.getppid(), 9)", ("AssertionError",)),
    "kill all others": ("os.kill(-1, 9)", NO_SUCH),
    "trace the caller": ("check(libc.ptrace(16, {pid}, 0, 0))", DENIED),
    "be traced": ("check(libc.ptrace(0, 0, 0, 0))", DENIED),
    "read another process's memory": ("check(libc.process_vm_readv({pid}, None, 0, None, 0, 0))", DENIED),
    "TCP": ("socket.create_connection(('127.0.0.1', {port}), 1)", DENIED),
    "UDP": ("socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", DENIED),
    "IPv6": ("socket.socket(socket.AF_INET6)", DENIED),
    "Unix socket": ("socket.socket(socket.AF_UNIX)", DENIED),
    "netlink": ("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", DENIED),
    "raw packets": ("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", DENIED),
    "vsock": ("socket.socket(40, socket.SOCK_STREAM)", DENIED),
    "kernel crypto socket": ("socket.socket(38, socket.SOCK_SEQPACKET)", DENIED),
    "socket by system call": ("check(libc.syscall(41 if os.uname().machine == 'x86_64' else 198, 2, 1, 0))", DENIED),
    "DNS": ("socket.getaddrinfo('example.com', 80)", ("gaierror",)),
    "HTTP": ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=1)", ("URLError",)),
    "io_uring": ("check(libc.syscall(425, 1, ctypes.create_string_buffer(200)))", READ_ONLY),
    "start a shell": ("os.execv('/bin/sh', ['sh'])", DENIED),
    "start Python": ("import subprocess; subprocess.run([sys.executable, '-c', ''])", DENIED),
    "run the loader": ("os.execv('/lib64/ld-linux-x86-64.so.2', ['ld', '--version'])", DENIED),
    "fork": ("os.fork()", DENIED),
    "new user namespace": ("check(libc.unshare(0x10000000))", DENIED),
    "new user namespace by clone": ("check(libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0))", DENIED),
    "enter a namespace": ("check(libc.setns(0, 0))", DENIED),
    "mount a tmpfs": ("check(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None))", DENIED),
    "unmount its folder": ("check(libc.umount2(b'/tmp', 2))", DENIED),
    "make the root writable": ("check(libc.mount(None, b'/', None, 32, None))", DENIED),
    "mount_setattr": ("check(libc.syscall(442, -100, b'/', 0, bytes(32), 32))", READ_ONLY),
    "chroot": ("os.chroot('/tmp')", DENIED),
    "become root": ("os.setuid(0)", DENIED),
    "change groups": ("os.setgroups([0])", DENIED),
    "setuid bit": ("open('a', 'w').close(); os.chmod('a', 0o4755); os.chown('a', 0, 0)", ("PermissionError", "OSError")),
    "raise its limits": ("import resource; resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6))", ("ValueError", "PermissionError")),
    "set the clock": ("import time; time.clock_settime(time.CLOCK_REALTIME, 0)", DENIED),
    "set the host name": ("socket.sethostname('x')", DENIED),
    "kernel log": ("check(libc.klogctl(3, ctypes.create_string_buffer(100), 100))", DENIED),
    "bpf": ("check(libc.syscall(321 if os.uname().machine == 'x86_64' else 280, 0, bytes(128), 128))", DENIED),
    "keyring": ("check(libc.syscall(250 if os.uname().machine == 'x86_64' else 219, 0, -3, 1))", DENIED),
    "shared memory that stays": ("check(libc.shmget(1234, 4096, 0o1666))", DENIED),
    "memory outside its limits": ("os.memfd_create('x')", DENIED),
    "write to the root": ("open('/x', 'w')", READ_ONLY),
    "write to the libraries": ("open('/usr/lib/x', 'w')", READ_ONLY),
    "write to a package": ("import numpy; open(numpy.__file__, 'a')", ("OSError", "PermissionError")),
    "write to /dev": ("open('/dev/x', 'w')", READ_ONLY),
    "make a device": ("os.mknod('d', 0o20666, os.makedev(1, 1))", DENIED),
    "read the disk": ("open('/dev/vda', 'rb')", ABSENT),
    "read memory": ("open('/dev/mem', 'rb')", ABSENT),
    "write to a terminal": ("open('/dev/tty', 'r+')", ABSENT),
    "/sys": ("os.listdir('/sys')", ABSENT),
    "symlink to a secret": ("os.symlink('/etc/passwd', 'l'); open('l')", ABSENT),
    "symlink out of its folder": ("os.symlink('/', 'l'); open('l/usr/x', 'w')", READ_ONLY),
    "hard link to a library": ("import numpy; os.link(numpy.__file__, 'l')", READ_ONLY),
    "climb above the root": ("open('../../../../../..' + {project!r} + '/README.md')", ABSENT),
    "file by handle": ("check(libc.open_by_handle_at(-100, bytes(100), 0))", DENIED),
    "huge file": ("open('big', 'wb').truncate(1 << 40)", ("OSError",)),
    "huge file, written": ("f = open('big', 'wb', 0)\n    while True: f.write(bytes(1 << 20))", ("OSError",)),
    "many files": ("for i in range(10**5): open(str(i), 'w').close()", ("OSError",)),
    "many open files": ("keep = [os.dup(0) for i in range(10**5)]", ("OSError",)),
    "many pipes": ("keep = [os.pipe() for i in range(10**5)]", ("OSError",)),
    "many threads": ("import threading, time\n    while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
                     ("RuntimeError",)),
    "descriptors it inherited": ("assert [fd for fd in range(3, 1000) if is_open(fd)]", ("AssertionError",)),
    "core dump": ("import resource; assert resource.getrlimit(resource.RLIMIT_CORE)[1] > 0", ("AssertionError",)),
}


@pytest.fixture(scope="module")
def listener():
    import socket
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("name", ATTEMPTS)
def test_attempt_fails(box, listener, name):
    attack, expected = ATTEMPTS[name]
    attack = attack.format(home=os.path.expanduser("~"), project=str(PROJECT), pid=os.getpid(), port=listener)
    helper = "import os\ndef is_open(fd):\n    try: os.fstat(fd); return True\n    except OSError: return False\n"
    outcome = one(box, helper + TRY.format(attack))
    assert outcome.kind == "ok", outcome
    assert outcome.stdout.strip() in expected, outcome
    assert SECRET not in outcome.stdout


# ---- programs that go for the whole -------------------------------------------------------------------------------------------------
IGNORE_SIGNALS = """
import signal
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
"""
ENDINGS = {
    "endless loop": ("while True: pass", {"timeout"}),
    "endless loop, signals held off": (IGNORE_SIGNALS + "while True: pass", {"timeout"}),
    "endless loop catching everything": ("while True:\n    try:\n        while True: pass\n    except BaseException: pass", {"timeout"}),
    "never ends in C": ("x = 9 ** 9 ** 9", {"timeout", "memory"}),
    "regex bomb": ("import re; re.match('(a+)+$', 'a' * 40 + 'b')", {"timeout"}),
    "zip bomb": ("import zlib\nd = zlib.compress(bytes(1 << 23), 9)\nx = [zlib.decompress(d) for i in range(100)]", {"memory"}),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(1 << 24))", {"memory"}),
    "memory bomb in numpy": ("import numpy; numpy.ones(1 << 40)", {"memory"}),
    "memory bomb by mmap": ("import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 24))", {"error", "memory"}),
    "endless output": ("while True: print('x' * 1000)", {"killed"}),
    "endless output on stderr": ("import os\nwhile True: os.write(2, b'x' * 65536)", {"killed"}),
    "endless output, ignoring errors": ("import os\nwhile True:\n    try: os.write(1, b'x' * 65536)\n    except OSError: pass", {"killed"}),
    "deep recursion in Python": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", {"memory", "killed", "timeout"}),
    "deep recursion in C": ("import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor i in range(10**5): x = [x]\nrepr(x)",
                            {"killed", "timeout"}),
    "null pointer": ("import ctypes; ctypes.string_at(0)", {"killed"}),
    "abort": ("import os; os.abort()", {"killed"}),
    "deep source": ("(" * 10**5 + ")" * 10**5, {"error", "memory", "killed"}),
    "os._exit": ("import os; print('lost'); os._exit(7)", {"error"}),
    "sys.exit with text": ("import sys; sys.exit('stop')", {"error"}),
    "input()": ("input()", {"error"}),
    "reads stdin": ("import sys; assert sys.stdin.read(1)", {"error"}),
    "lone surrogate, printed": ("print(chr(0xD800))", {"error"}),
    "NUL byte in the source": ("print(1)\0", {"error"}),
    "lone surrogate in the source": ("print('\ud800')", {"refused"}),
    "10 MB of source": ("x = 1\n" * 1_700_000, {"refused"}),
    "unknown coding": ("# -*- coding: nonsense -*-\n", {"error"}),
    "closes all descriptors": ("import os; os.closerange(0, 100); 1 / 0", {"error"}),
    "replaces stdout": ("import sys; sys.stdout = None; 1 / 0", {"error"}),
    "exception after printing": ("print('fine'); 1 / 0", {"error"}),
    "thread left running": ("import threading, time; threading.Thread(target=time.sleep, args=(99,)).start()", {"timeout"}),
    "hangs at exit": ("import atexit, time; atexit.register(time.sleep, 99)", {"timeout"}),
}


@pytest.fixture(scope="module")
def endings(box):
    """All of them at once: most only wait for a limit."""
    return dict(zip(ENDINGS, box.run([program for program, _ in ENDINGS.values()])))


@pytest.mark.parametrize("name", ENDINGS)
def test_ending(box, endings, name):
    outcome = endings[name]
    assert outcome.kind in ENDINGS[name][1], outcome
    assert outcome.exception and outcome.run_s < QUICK.wall_s + 2
    assert len(outcome.stdout) <= QUICK.output_bytes and len(outcome.stderr) <= QUICK.output_bytes
    assert one(box, "print('still here')").kind == "ok"


FORGE = """
import os, struct
for fd in range(0, 64):
    for forged in (b"\\0" * 64, struct.pack("!BidII?", 0, 0, 0.0, 2, 0, False) + b"42"):
        try: os.write(fd, forged)
        except OSError: pass
os._exit(1)
"""


def test_result_cannot_be_forged(box):
    outcome = one(box, FORGE)
    assert outcome.kind == "error"
    assert [o.stdout for o in box.run(["print(1)"] * 4)] == ["1\n"] * 4


def test_patched_interpreter_stays_an_error(box):
    patch = "import os, sys, traceback, builtins\n" + "".join(f"{f} = lambda *a, **k: 0\n" for f in (
        "os._exit", "os.write", "sys.excepthook", "traceback.print_exception", "builtins.print")) + "1 / 0"
    assert one(box, patch).kind in ("error", "killed")


def test_fork_bomb(forking):
    outcome = one(forking, "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass")
    assert outcome.kind == "timeout" and outcome.run_s < 4
    assert one(forking, "print(1)").stdout == "1\n"


def test_daemons_end_with_the_call(forking):
    time.sleep(0.3)  # the next program's process is made ahead
    before = len(descendants())
    start = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1e6)\n    os._exit(0)\n" \
            "os.wait()\nprint('done')"
    assert one(forking, start).stdout == "done\n"
    time.sleep(0.3)
    assert len(descendants()) == before


def test_processes_of_a_call_cannot_reach_the_worker(forking):
    program = "import os\nif os.fork() == 0:\n    for p in range(2, 300):\n        try:\n            if p != os.getpid(): os.kill(p, 9)\n" \
              "        except OSError: pass\n    os.kill(1, 9)\n    os._exit(0)\nos.wait()\nprint('alive')"
    assert one(forking, program).stdout == "alive\n"


# ---- nothing is left for the next call ----------------------------------------------------------------------------------------------
# All memory near known objects, read through a pipe, which refuses what is not mapped. The needle is spelt backwards, not to find itself.
SCAN = """
import ctypes, os, sys
libc, (r, w), found, pages = ctypes.CDLL(None), os.pipe(), 0, 0
known = [id(x) for m in list(sys.modules.values()) for x in (m, vars(m))] + [id(bytes(n)) for n in (600, 5000, 90000)]
regions = {(a >> 21) + d for a in known for d in range(-4, 5)}
for address in (n << 21 | k << 12 for n in regions for k in range(512)):
    if libc.write(w, ctypes.c_void_p(address), ctypes.c_size_t(4096)) == 4096:
        pages += 1
        found += os.read(r, 4096)[::-1].count(b"eno-eldeen")
assert pages > 2000
print(found)
"""
LEAVE = {
    "temp file": ("open('left', 'w').write('x')", "import os; print(os.listdir('.'), os.listdir('/tmp'))", "[] []\n"),
    "folder without rights": ("import os; os.makedirs('a/b'); os.chmod('a', 0)", "import os; print(os.listdir('/tmp'))", "[]\n"),
    "module attribute": ("import json; json.left = 1", "import json; print(hasattr(json, 'left'))", "False\n"),
    "patched module": ("import math; math.sqrt = lambda x: 0", "import math; print(math.sqrt(4))", "2.0\n"),
    "patched builtin": ("import builtins; builtins.len = lambda x: 0", "print(len('ab'))", "2\n"),
    "import hook": ("import sys; sys.meta_path.insert(0, 1); sys.modules['csv'] = None", "import csv; print(csv.__name__)", "csv\n"),
    "global": ("left = 1", "print('left' in globals())", "False\n"),
    "environment variable": ("import os; os.environ['LEFT'] = '1'", "import os; print('LEFT' in os.environ)", "False\n"),
    "random numbers": ("import random; random.random()", "import random; print(random.random())", "0.8444218515250481\n"),
    "atexit": ("import atexit; atexit.register(print, 'late')", "print(1)", "1\n"),
    "numpy setting": ("import numpy; numpy.set_printoptions(precision=1)", "import numpy; print(numpy.array([1.25]))", "[1.25]\n"),
    "program text and output in memory": ("left = 'needle-one'; print(left * 50)", SCAN, "0\n"),
}


@pytest.mark.parametrize("name", LEAVE)
def test_nothing_is_left(box, name):
    leave, look, expected = LEAVE[name]
    box.run([leave] * 4)
    assert [o.stdout for o in box.run([look] * 4)] == [expected] * 4


def test_scan_finds_what_is_there(box):
    assert int(one(box, "left = 'needle-one' * 3\n" + SCAN).stdout) >= 3


# ---- ordinary programs --------------------------------------------------------------------------------------------------------------
def test_ordinary(box):
    programs = {
        "print(6 * 7)": "42\n",
        "import sympy; x = sympy.Symbol('x'); print(sympy.solve(x**2 - 4, x))": "[-2, 2]\n",
        "import numpy as np; print(int(np.linalg.det(np.array([[2., 0.], [0., 3.]])).round()))": "6\n",
        "if __name__ == '__main__':\n    print('main')": "main\n",
        "print('π ≈ 3.14')": "π ≈ 3.14\n",
        "import sys; print('a'); sys.exit(0)": "a\n",
        "print('b'); exit()": "b\n",
        "import os; print('c', flush=True); os._exit(0)": "c\n",
        "open('f', 'w').write('d'); print(open('f').read())": "d\n",
        "import threading; t = threading.Thread(target=print, args=('e',)); t.start()": "e\n",
        "import tempfile; print(tempfile.mkstemp()[1][:5])": "/tmp/\n",
        "import asyncio; print(asyncio.run(asyncio.sleep(0, 'g')))": "g\n",
        "import sqlite3, ssl, decimal, hashlib, csv; print('h')": "h\n",
        "from concurrent.futures import ThreadPoolExecutor as P; print(*P(4).map(abs, [-1, 2]))": "1 2\n",
        "class A: pass\nimport pickle; print(type(pickle.loads(pickle.dumps(A()))).__name__)": "A\n",
    }
    for (program, expected), outcome in zip(programs.items(), box.run(list(programs))):
        assert (outcome.kind, outcome.stdout, outcome.exception) == ("ok", expected, ""), (program, outcome)
        assert outcome.run_s > 0 and outcome.wait_s >= 0 and not outcome.truncated


def test_outcomes(box):
    empty, error, code, partial, memory, stderr = box.run(
        ["x = 1", "def f():\n    return 1 / 0\nf()", "import sys; sys.exit(3)", "print('so far', flush=True)\nwhile True: pass",
         "x = ' ' * (1 << 40)", "import sys; print('warn', file=sys.stderr); print('out')"])
    assert (empty.kind, empty.stdout) == ("ok_empty", "")
    assert (error.kind, error.exception) == ("error", "ZeroDivisionError: division by zero")
    assert "line 2, in f\n    return 1 / 0" in error.stderr and "sandbox" not in error.stderr
    assert (code.kind, code.exception) == ("error", "exit status 3")
    assert (partial.kind, partial.stdout) == ("timeout", "so far\n") and "1 s of processor time" in partial.exception
    assert (memory.kind, memory.exception) == ("memory", "MemoryError")
    assert (stderr.kind, stderr.stdout, stderr.stderr) == ("ok", "out\n", "warn\n")


def test_long_output_keeps_the_start_and_the_last_error(box):
    outcome = one(box, "import sys\nfor i in range(100_000): print(i); print('e', file=sys.stderr)\n1 / 0")
    assert outcome.kind == "error" and outcome.truncated and outcome.exception == "ZeroDivisionError: division by zero"
    assert outcome.stdout.startswith("0\n1\n2\n") and len(outcome.stdout) == QUICK.output_bytes


def test_order_and_waiting():
    try:
        opened = open_sandbox("isolated", Limits(wall_s=1.0), workers=1)
    except UserError as error:
        skip_without_namespaces(error)
    with opened as box:
        outcomes = box.run([f"import time; time.sleep(0.4); print({i})" for i in range(4)])
    assert [(o.kind, o.stdout) for o in outcomes] == [("ok", f"{i}\n") for i in range(4)]  # 1.6 s in all, yet none has timed out
    assert outcomes[3].wait_s > 1.1 and outcomes[3].run_s < 1


def test_same_result_in_another_sandbox(box):
    program = "import random, numpy; print(random.random(), numpy.random.rand(), list({'a', 'b', 'c', 'd'}))"
    with open_sandbox("isolated", workers=1) as other:
        assert one(other, program).stdout == one(box, program).stdout != ""


def test_lost_worker_is_replaced(box):
    with open_sandbox("isolated", QUICK, workers=1) as own:
        workers = [p for p in descendants() if b"sandbox._start" in Path(f"/proc/{p}/cmdline").read_bytes()]
        server = own._server.pid
        below = [p for p in workers if int(Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[1]) == server]
        for p in below:
            os.kill(p, 9)
        assert one(own, "print(1)").stdout == "1\n"
        own._server.kill()
        own._server.wait()
        with pytest.raises(SandboxDown, match="start the run again|two workers"):
            for _ in range(100):  # what the server started dies soon after it
                assert one(own, "print(1)").stdout == "1\n"
                time.sleep(0.05)


def test_killed_caller_leaves_nothing():
    code = "from common.sandbox import *\nbox = open_sandbox('unsafe', packages=(), workers=1)\n" \
           "print(box._server.pid, flush=True)\nbox.run(['import time; time.sleep(60)'])"
    with subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE, text=True) as caller:
        server = int(caller.stdout.readline())
        time.sleep(0.3)
        caller.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{server}").exists() and "Z" not in Path(f"/proc/{server}/stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < deadline, "the server outlives its caller"
        time.sleep(0.05)


def test_nothing_left_behind():
    before, files = len(descendants()), len(os.listdir("/proc/self/fd"))
    hostile = ["import os; os._exit(1)", "x = bytearray(1 << 40)", "open('f', 'w').write('x'); 1 / 0", "import ctypes; ctypes.string_at(0)"]
    try:
        with open_sandbox("isolated", QUICK, workers=2) as own:
            assert len(descendants()) > before
            own.run(["print(1)"] * 100 + hostile)
            held = len(os.listdir("/proc/self/fd"))
            own.run(["print(1)"] * 100 + hostile)
            assert len(os.listdir("/proc/self/fd")) == held
    except UserError as error:
        skip_without_namespaces(error)
    assert len(descendants()) == before and len(os.listdir("/proc/self/fd")) == files


# ---- messages, "unsafe", the command ------------------------------------------------------------------------------------------------
def test_refusals(monkeypatch):
    with pytest.raises(UserError, match="there is no sandbox 'safe'; choose"):
        open_sandbox("safe")
    with pytest.raises(UserError, match="wall_s must be above 0"):
        Limits(wall_s=0)
    with pytest.raises(UserError, match="cpu_s must be whole seconds"):
        Limits(cpu_s=1.5)
    with pytest.raises(UserError, match="cannot import .*nonsense_x.*leave it out"):
        open_sandbox("unsafe", packages=("nonsense_x",))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="cannot be isolated on .* 'unsafe', which .* protects neither files"):
        open_sandbox("isolated")


def test_refused_by_the_kernel():
    """In a process that may not make namespaces, the message names the step and the ways out."""
    code = "import ctypes\nfrom common import sandbox, UserError\n" \
           "sandbox._BOOT = sandbox._BOOT.replace('sandbox._start()', 'sandbox._call = lambda *a: (_ for _ in ()).throw(OSError(1, " \
           "\"unshare: Operation not permitted\")); sandbox._start()')\ntry: sandbox.open_sandbox()\nexcept UserError as e: print(e)"
    said = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=60).stdout
    assert said.startswith("programs cannot be isolated here (unshare: Operation not permitted): on Ubuntu") and "choose 'unsafe'" in said


def test_unsafe():
    with open_sandbox("unsafe", Limits(wall_s=1.0, cpu_s=1, memory_mb=256), workers=1) as box:
        ok, error, loop, memory, folder = box.run(["print(1)", "1 / 0", "import time; time.sleep(9)", "x = bytearray(1 << 40)",
                                                   "import os, tempfile; open('f', 'w'); print(os.getcwd()); print(tempfile.gettempdir())"])
    assert [o.kind for o in (ok, error, loop, memory)] == ["ok", "error", "timeout", "memory"]
    places = folder.stdout.split()
    assert places[0] == places[1] and not os.path.exists(places[0])


def test_command(capsys):
    assert sandbox.main([]) == sandbox.main(["--check", "a", "b"]) == sandbox.main(["--nonsense"]) == 2
    assert "usage" in capsys.readouterr().err
    assert sandbox.main(["--check", "nonsense"]) == 2
    assert "there is no sandbox 'nonsense'" in capsys.readouterr().err


def test_check(box):
    lines = []
    assert sandbox.check(box, lines.append) == 0, lines
    assert len(lines) > 20 and all(line.startswith("protected ") for line in lines)


# ---- SandboxFusion ------------------------------------------------------------------------------------------------------------------
def ran(code=0, stdout="", stderr="", status="Finished"):
    return dict(status="Success" if code == 0 else "Failed", message="", compile_result=None, executor_pod_name=None, files={},
                run_result=dict(status=status, execution_time=0.25, return_code=code, stdout=stdout, stderr=stderr))


ANSWERS = {  # by what the program says
    "print(6 * 7)": ran(0, "42\n"), "x = 1": ran(0, ""), "import sys; sys.exit(3)": ran(3),
    "print(1)\n1 / 0": ran(1, "1\n", "Traceback\nZeroDivisionError: division by zero\n"),
    "loop": ran(None, "part", status="TimeLimitExceeded"), "killed": ran(-9), "oom": ran(1, "", "MemoryError\n"),
    "long": ran(0, "x" * 100_000),
    "broken": dict(status="SandboxError", message="no disk", run_result=dict(status="Error", return_code=None, stdout=None, stderr=None)),
    "odd": dict(status="Success", run_result=None), "list": [],
}


class Fusion(http.server.BaseHTTPRequestHandler):
    seen: list[dict] = []
    failures = 0  # answers of status 500 before it works

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({"path": self.path, **asked})
        if Fusion.failures > 0:
            Fusion.failures -= 1
            return self.send_error(500)
        if asked["code"] not in ANSWERS:
            return self.send_error(422)
        body = json.dumps(ANSWERS[asked["code"]]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def fusion(monkeypatch):
    monkeypatch.setattr(sandbox.time, "sleep", lambda s: None)
    Fusion.seen, Fusion.failures = [], 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fusion) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with open_sandbox(f"http://127.0.0.1:{server.server_address[1]}", Limits(wall_s=2.0), workers=2) as box:
            yield box
        server.shutdown()


def test_fusion_outcomes(fusion):
    programs = ["print(6 * 7)", "x = 1", "print(1)\n1 / 0", "loop", "killed", "oom", "long", "\ud800"]
    outcomes = fusion.run(programs)
    assert [o.kind for o in outcomes] == ["ok", "ok_empty", "error", "timeout", "killed", "memory", "ok", "refused"]
    assert outcomes[2].exception == "ZeroDivisionError: division by zero" and outcomes[3].stdout == "part"
    assert outcomes[0].run_s == 0.25 and outcomes[6].truncated and len(outcomes[6].stdout) == 1 << 16
    asked = Fusion.seen[0]
    assert asked["path"] == "/run_code" and asked["language"] == "python" and asked["run_timeout"] == 2.0


@pytest.mark.parametrize("program", ["broken", "odd", "list"])
def test_fusion_failure_is_no_outcome(fusion, program):
    Fusion.seen = []
    with pytest.raises(SandboxDown, match="gave no result"):
        fusion.run([program])
    assert len(Fusion.seen) == 3


def test_fusion_tries_again_only_for_the_server(fusion):
    Fusion.failures, Fusion.seen = 2, []
    assert fusion.run(["print(6 * 7)"])[0].kind == "ok" and len(Fusion.seen) == 3
    Fusion.seen = []
    assert fusion.run(["print(1)\n1 / 0"])[0].kind == "error" and len(Fusion.seen) == 1
    with pytest.raises(SandboxDown, match="HTTP status 422"):
        fusion.run(["unknown"])
    assert len(Fusion.seen) == 2


def test_fusion_nobody_there(monkeypatch):
    monkeypatch.setattr(sandbox.time, "sleep", lambda s: None)
    with pytest.raises(SandboxDown, match="http://127.0.0.1:9/run_code gave no result .*refused"):
        open_sandbox("http://127.0.0.1:9/")


def test_packages_that_live_under_tmp_are_seen_by_programs(tmp_path):
    """A virtual environment in /tmp: the empty /tmp of a program must not cover it."""
    folder = tempfile.mkdtemp(dir="/tmp")
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        package = next(Path(folder, "lib").glob("python3*")) / "site-packages" / "late"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "part.py").write_text("x = 42")
        code = ("from common.sandbox import open_sandbox\nwith open_sandbox('isolated', packages=('late',)) as box:\n"
                "    print(*(o.stdout + o.exception for o in box.run(['import late.part, os; print(late.part.x, os.listdir(\\'/tmp\\'))'])))")
        done = subprocess.run([f"{folder}/bin/python", "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    finally:
        shutil.rmtree(folder)
    if done.returncode and "cannot be isolated" in done.stderr:
        skip_without_namespaces(UserError(done.stderr))
    assert done.stdout.strip() == "42 []", done.stderr
