"""What a sandboxed program cannot reach: processes, files, network, secrets, its own limits."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sandbox_settings import both, in_namespace, outcome

from hybridrl.rewards.jail import Isolation, Outcome

PASSED, FAILED, _ = Outcome
NAMESPACE = Isolation.namespace
LONGER = {"seconds_per_test": 5.0}


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


@both
def test_no_process_can_be_made(isolation):
    """os.fork, subprocess and the bare system calls, fifty times each: none succeeds."""
    program = (
        "import ctypes, os, subprocess, time\n"
        "libc, made = ctypes.CDLL(None), 0\n"
        "def bare(number):\n"
        "    made = libc.syscall(number, 17, 0, 0, 0, 0)\n"
        "    if made == 0:\n        time.sleep(600)\n"
        "    return made > 0\n"
        "for _ in range(50):\n"
        "    for way in (os.fork, lambda: subprocess.Popen(['sleep', '600']),\n"
        "                lambda: os.posix_spawn('/bin/sleep', ['sleep', '600'], {})):\n"
        "        try:\n            pid = way()\n            made += 1\n"
        "        except OSError:\n            continue\n"
        "        if pid == 0:\n            time.sleep(600)\n"
        "    made += bare(56) + bare(57)\n"
    )
    assert outcome(program, isolation, "assert made == 0", seconds_per_test=5.0) is PASSED


@both
def test_threads_can(isolation):
    program = "import threading\nseen = []\nt = threading.Thread(target=seen.append, args=(1,))"
    assert outcome(program, isolation, "t.start(); t.join(); assert seen == [1]") is PASSED


@both
def test_no_program_can_be_started(isolation):
    assert outcome("import os\nos.execv('/bin/true', ['true'])", isolation) is FAILED


@both
def test_other_files_cannot_be_changed(isolation, tmp_path):
    target = tmp_path / "kept"
    target.write_text("before")
    program = f"""
import os, pathlib
path, folder = pathlib.Path({str(target)!r}), pathlib.Path({str(tmp_path)!r})
ways = [
    lambda: path.write_text("after"), lambda: path.open("a"), lambda: path.open("r+"),
    lambda: os.truncate(path, 0), lambda: path.unlink(), lambda: path.rename(folder / "new"),
    lambda: path.chmod(0o777), lambda: os.utime(path), lambda: (folder / "new").mkdir(),
    lambda: (folder / "new").touch(), lambda: os.symlink("/", folder / "new"),
    lambda: os.link(path, folder / "new"), lambda: os.setxattr(path, "user.a", b"1"),
]
worked = []
for number, way in enumerate(ways):
    try:
        way()
        worked.append(number)
    except OSError:
        pass
"""
    assert outcome(program, isolation, "assert worked == [], worked") is PASSED
    assert os.listdir(tmp_path) == ["kept"]
    assert target.read_text() == "before"


@both
def test_the_network_is_out_of_reach(isolation):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        program = (
            "import socket, urllib.request\n"
            f"address = ('127.0.0.1', {server.getsockname()[1]})\n"
            "def attempt(way):\n"
            "    try: way()\n"
            "    except OSError: return 'refused'\n"
            "ways = [lambda: socket.create_connection(address), socket.socket,\n"
            "        lambda: socket.socket(socket.AF_UNIX),\n"
            "        lambda: urllib.request.urlopen('http://%s:%d' % address)]\n"
            "found = [attempt(way) for way in ways]\n"
        )
        statements = "assert found == ['refused'] * 4, found"
        assert outcome(program, isolation, statements, seconds_per_test=5.0) is PASSED
        with pytest.raises(TimeoutError):
            server.accept()


@in_namespace
def test_the_namespace_alone_has_no_network_either():
    """Should a program get past the filter, no interface is up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (
            "import socket\nfrom hybridrl.rewards.kernel import leave_namespaces\n"
            f"address = ('127.0.0.1', {server.getsockname()[1]})\n"
            "socket.create_connection(address, 1).close()\nprint('reached')\n"
            "leave_namespaces()\n"
            "try: socket.create_connection(address, 1)\n"
            "except OSError as error: print(error.strerror)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "reached\nNetwork is unreachable\n", done.stderr


@both
def test_the_environment_is_empty(isolation, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    program = "import os\nfound = dict(os.environ)"
    assert outcome(program, isolation, "assert not found, found") is PASSED


@both
def test_nothing_that_may_hold_a_secret_can_be_read(isolation, monkeypatch):
    """Environments in /proc, and files with the user's tokens, though they are his own."""
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    with tempfile.TemporaryDirectory(dir=Path.home()) as home:
        token = Path(home, ".cache", "huggingface", "token")
        token.parent.mkdir(parents=True)
        token.write_text("s3cret")
        program = f"""
import os
paths = [
    "/proc/1/environ", "/proc/self/environ", "/proc/{os.getpid()}/environ",
    "/proc/{os.getpid()}/cmdline", f"/proc/{{os.getppid()}}/environ",
    "{token}", "{Path.home()}/.netrc", "{Path.home()}", "{home}", "/etc/passwd", "/", "/proc",
    os.path.relpath("{token}"),
]
read = []
for path in paths:
    for way in (lambda: open(path).read(), lambda: os.listdir(path), lambda: os.scandir(path)):
        try:
            if way():
                read.append(path)
        except OSError:
            pass
import csv, decimal, json, zoneinfo  # what programs need is still there
if os.path.isdir("/usr/share/zoneinfo"):
    zoneinfo.ZoneInfo("Europe/Berlin")
open("/dev/urandom", "rb").read(4)
"""
        assert outcome(program, isolation, "assert read == [], read", **LONGER) is PASSED


@in_namespace
def test_a_program_reads_what_it_has_written_itself():
    program = (
        "import os\nos.mkdir('a'); os.mkdir('b')\nopen('a/x', 'w').write('1')\n"
        "os.rename('a/x', 'b/y')\nfound = open('b/y').read(), os.listdir('b'), os.listdir('a')"
    )
    assert outcome(program, NAMESPACE, "assert found == ('1', ['y'], []), found") is PASSED


@in_namespace
def test_other_processes_are_not_to_be_seen(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    program = f"""
import os
found = []
try:
    found += os.listdir("/proc")
    found.append(open("/proc/{os.getpid()}/environ").read())
except OSError:
    pass
"""
    assert outcome(program, NAMESPACE, "assert found == [], found") is PASSED


@both
def test_other_processes_cannot_be_hurt(isolation):
    """Signals, memory, limits and priority of the judge and of this process."""
    victim = subprocess.Popen(["sleep", "600"])
    program = f"""
import ctypes, os, resource, signal
libc = ctypes.CDLL(None)
worked = []
for pid in ({victim.pid}, {os.getpid()}, os.getppid()):
    for name, way in dict(
        kill=lambda: os.kill(pid, signal.SIGKILL),
        group=lambda: os.killpg(pid, signal.SIGKILL),
        pidfd=lambda: os.pidfd_open(pid),
        limit=lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)),
        priority=lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        memory=lambda: open(f"/proc/{{pid}}/mem", "r+b"),
    ).items():
        try:
            way()
            worked.append(name)
        except OSError:
            pass
    for number in (101, 234, 310, 311):  # ptrace(ATTACH), tgkill, process_vm_readv and writev
        if libc.syscall(number, 16 if number == 101 else pid, pid, 9, 0, 0, 0) >= 0:
            worked.append(number)
"""
    try:
        assert outcome(program, isolation, "assert worked == [], worked") is PASSED
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


@both
def test_limits_cannot_be_raised(isolation):
    program = """
import resource
raised = []
for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        raised.append(kind)
    except (OSError, ValueError):
        pass
"""
    assert outcome(program, isolation, "assert raised == [], raised") is PASSED


@in_namespace
def test_without_namespaces_nothing_is_run():
    """A user namespace of our own that allows none below stands for such a machine."""
    code = (
        "from sandbox_settings import missing, Isolation\n"
        "print(missing(Isolation.namespace)); print(repr(missing(Isolation.filter)))\n"
        "from hybridrl.rewards.code import score\n"
        "limits = dict(seconds_per_test=1.0, seconds=5.0, memory_mb=256, file_mb=2)\n"
        "args = dict(tests_key='t', grading='all', isolation='namespace', limits=limits)\n"
        "print(*score.problems('reward', args))\n"
    )
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", shell, "sh", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    namespace, filter_, *problem = done.stdout.splitlines()
    assert "isolation namespace:" in namespace and "unshare: No space left" in namespace, done
    assert filter_ == "''"
    assert problem[0].startswith("reward.args.isolation = namespace, but the sandbox does not work")
    assert "isolation=filter" in problem[1]
