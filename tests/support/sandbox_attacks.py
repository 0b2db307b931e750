"""Attacks of a program on what is outside of its sandbox, and their victims.

As a script it attacks as the user who runs it and prints what came of it:

    python sandbox_attacks.py bubblewrap|none
"""

import ctypes
import fcntl
import json
import os
import pty
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hybridrl.rewards.sandbox.programs import Case, Isolation, Limits, Outcome, run_tests

REPO = Path(__file__).resolve().parents[2]
LIBC = ctypes.CDLL(None, use_errno=True)
SECRET = "s3cret-" + secrets.token_hex(8)
CALLS = (
    *("add_key", "bpf", "clone3", "close_range", "finit_module", "fork", "io_uring_setup"),
    *("kexec_load", "keyctl", "perf_event_open", "process_vm_readv", "reboot", "request_key"),
    *("syslog", "userfaultfd", "vfork"),
)
# Every attack is a function that returns something true if it has worked, or raises OSError. `v`
# holds the victims, `call` makes a system call by its name.
PRELUDE = """
import ctypes, fcntl, json, os, resource, signal, socket, stat, struct, subprocess, sys, threading
import time
v = json.loads({victims!r})
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return True
def call(name, *args):
    return checked(libc.syscall(v["calls"][name], *args))
def has_right(name, *args):
    "Whether a call, made wrongly, fails for another reason than missing rights."
    try:
        return call(name, *args)
    except OSError as error:
        return error.errno not in (1, 38)  # EPERM; ENOSYS: this kernel has no such call
def sent(family, kind, address):
    with socket.socket(family, kind) as own:
        own.connect(address)
        return own.send(b"x")
def written(path, flags=0):
    fd = os.open(path, os.O_WRONLY | flags)
    return os.write(fd, b"x")
def owned_signal(pid):
    "The kernel sends SIGKILL to the owner of a pipe that becomes readable."
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, pid)
    fcntl.fcntl(reader, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writer, b"x")
    time.sleep(0.05)
    return pid == v["pid"]
def threads():
    end, started = threading.Event(), 0
    threading.stack_size(2**16)
    try:
        for started in range(200):
            threading.Thread(target=end.wait, daemon=True).start()
    except RuntimeError:
        pass
    end.set()
    return started > 62
def children(start):
    "Whether a child can be made, which ends at once."
    pid = start()
    if pid == 0:
        os._exit(0)
    checked(pid)
    return True
def thread(flags):
    "Whether a thread can be made with these flags; it calls abs(0) and ends."
    stack = ctypes.create_string_buffer(2**16)
    top = ctypes.c_void_p(ctypes.addressof(stack) + 2**15 & -16)
    checked(libc.clone(libc.abs, top, 0x10900 | flags, None))  # CLONE_VM, _SIGHAND, _THREAD
    time.sleep(0.1)
    return True
clone_arguments = struct.pack("@8Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
def many_files(number):
    for i in range(number):
        os.close(os.open("%d" % i, os.O_CREAT))
    return True
def capabilities():
    header, data = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    checked(libc.capget(header, data))
    return any(data.raw[:8] + data.raw[12:20])
def memory_of(pid):
    size = 8
    local, remote = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)
    def vector(buffer):
        return struct.pack("@PN", ctypes.addressof(buffer), size)
    return call("process_vm_readv", pid, vector(local), 1, vector(remote), 1, 0)
def raised_limit():
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE,
                 resource.RLIMIT_CPU, resource.RLIMIT_CORE, resource.RLIMIT_NOFILE):
        try:
            resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            return True
        except (OSError, ValueError):
            pass
def queue(name):
    fd = libc.mq_open(name.encode(), os.O_RDWR)
    return checked(fd)
def shared_memory():
    libc.shmat.restype = ctypes.c_void_p
    checked(libc.shmget(v["key"], 16, 0))
    return libc.shmat(v["segment"], 0, 0) != 2**64 - 1
"""
ATTACKS = {
    # Files and devices.
    "terminal": "written(v['terminal'], os.O_NOCTTY)",
    "fifo": "written(v['fifo'], os.O_NONBLOCK)",
    "loop_device": "written(v['loop'])",
    "made_device": "os.mknod('d', 0o600 | stat.S_IFBLK, os.makedev(7, 0)) or written('d')",
    "made_character_device": "os.mknod('d', 0o600 | stat.S_IFCHR, os.makedev(1, 11))",
    "other_devices": "set(os.listdir('/dev')) - {'null', 'zero', 'urandom'}",
    "controlling_terminal": "os.open('/dev/tty', os.O_RDWR)",
    "typed_input": "[fcntl.ioctl(fd, 0x5412, b'x') for fd in range(3)]",
    "shared_memory_files": "written('/dev/shm/' + v['name'], os.O_CREAT)",
    "token": "open(v['token']).read()",
    "token_by_relative_path": "open(os.path.relpath(v['token'])).read()",
    "token_by_symlink": "os.symlink(v['token'], 'l') or open('l').read()",
    "home": "os.listdir(v['home'])",
    "ssh_keys": "os.listdir(os.path.join(v['home'], '.ssh'))",
    "repository": "open(v['source']).read()",
    "users": "open('/etc/passwd').read()",
    "proc": "os.listdir('/proc')",
    "environment_of_others": "open('/proc/%d/environ' % v['pid'], 'rb').read()",
    "memory_file_of_others": "open('/proc/%d/mem' % v['pid'], 'r+b')",
    "sys": "os.listdir('/sys')",
    "run": "os.listdir('/run')",
    "programs": "os.listdir('/usr/bin') != [] and open('/usr/bin/env', 'rb').read(4)",
    "write_outside": "open(v['file'], 'a').write('x')",
    "truncate_outside": "os.truncate(v['file'], 0) is None",
    "remove_outside": "os.unlink(v['file']) is None",
    "rename_outside": "os.rename(v['file'], v['file'] + '2') is None",
    "mode_outside": "os.chmod(v['file'], 0o777) is None",
    "times_outside": "os.utime(v['file'], (1, 1)) is None",
    "attribute_outside": "os.setxattr(v['file'], 'user.a', b'1') is None",
    "inode_flags": "fcntl.ioctl(open(v['file']), 0x40086602, struct.pack('@l', 0x40)) != b''",
    "inode_flags_of_libraries": (
        "fcntl.ioctl(open(os.__file__), 0x40086602, struct.pack('@l', 0x40)) != b''"
    ),
    "write_library": "open(os.__file__, 'r+')",
    "remove_library": "os.unlink(os.__file__) is None",
    "link_library": "os.link(os.__file__, 'l') is None",
    "write_root": "open('/x', 'w')",
    "write_dev": "os.mkdir('/dev/x') is None",
    "many_files": "many_files(20_000)",
    "long_names": "os.mkdir('x' * 5000) is None",
    "run_from_own_folder": (
        "open('p', 'w').write('#!/bin/sh\\n') and os.chmod('p', 0o700) or os.execv('./p', ['p'])"
    ),
    # Processes.
    "signal": "os.kill(v['pid'], signal.SIGKILL) is None",
    "signal_to_group": "os.killpg(v['pid'], signal.SIGKILL) is None",
    "signal_to_judge": "os.kill(os.getppid(), signal.SIGKILL) or time.sleep(0.05)",
    "interrupt_judge": "os.kill(os.getppid(), signal.SIGINT) or time.sleep(0.05)",
    "owner_signal": "owned_signal(v['pid'])",
    "owner_signal_to_judge": "owned_signal(os.getppid())",
    "pidfd": "os.pidfd_open(v['pid'])",
    "trace": "checked(libc.ptrace(16, v['pid'], 0, 0))",
    "trace_judge": "checked(libc.ptrace(16, os.getppid(), 0, 0))",
    "memory": "memory_of(v['pid'])",
    "memory_of_judge": "memory_of(os.getppid())",
    "limit_of_others": "resource.prlimit(v['pid'], resource.RLIMIT_CPU, (1, 1))",
    "limit_of_judge": "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "priority_of_others": "os.setpriority(os.PRIO_PROCESS, v['pid'], 19) is None",
    "higher_priority": "os.nice(-1)",
    "real_time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)) is None",
    "raised_limit": "raised_limit()",
    "core_dump": "resource.getrlimit(resource.RLIMIT_CORE) != (0, 0)",
    "threads": "threads()",
    "descriptors_of_its_own": "call('close_range', 2**31, 2**31, 2)",  # CLOSE_RANGE_UNSHARE
    "thread_with_descriptors_of_its_own": "thread(0)",
    "fork": "children(os.fork)",
    "bare_fork": "children(lambda: libc.syscall(v['calls']['fork']))",
    "clone3": "children(lambda: libc.syscall(v['calls']['clone3'], clone_arguments, 64))",
    "subprocess": "subprocess.run([sys.executable, '-c', '']).returncode == 0",
    "spawn": "os.posix_spawn(sys.executable, ['python', '-c', ''], {})",
    "exec": "os.execv(sys.executable, ['python', '-c', ''])",
    # Rights and namespaces.
    "root": "os.setuid(0) or os.getuid() == 0",
    "groups": "os.setgroups([0]) is None",
    "capabilities": "capabilities()",
    "new_rights": "libc.prctl(39, 0, 0, 0, 0) != 1",
    "user_namespace": "checked(libc.unshare(0x10000000))",
    "network_namespace": "checked(libc.unshare(0x40000000))",
    "mount": "checked(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None))",
    "remount": "checked(libc.mount(None, b'/', None, 0x1020, None))",
    "unmount": "checked(libc.umount2(b'/tmp', 2))",
    "chroot": "os.chroot('.') is None",
    "reboot": "has_right('reboot', 1, 2, 3, 0)",
    "kexec": "has_right('kexec_load', 0, 0, 0, 0xffff)",
    "kernel_module": "has_right('finit_module', -1, b'', 0)",
    "host_name": "socket.sethostname(v['host']) is None",
    # Networks and other ways between processes.
    "tcp": "sent(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', v['port']))",
    "udp": "sent(socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', v['udp_port']))",
    "raw_socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "vsock": "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
    "crypto_socket": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "unix_datagram": "sent(socket.AF_UNIX, socket.SOCK_DGRAM, v['datagrams'])",
    "abstract_datagram": "sent(socket.AF_UNIX, socket.SOCK_DGRAM, '\\0' + v['name'])",
    "sysv_memory": "shared_memory()",
    "own_sysv_memory": "checked(libc.shmget(0, 2**20, 0o1600))",
    "sysv_queue": "checked(libc.msgget(v['key'], 0o1600))",
    "sysv_semaphore": "checked(libc.semget(v['key'], 1, 0o1600))",
    "posix_queue": "queue('/' + v['name'])",
    "uncounted_memory": "os.memfd_create('x')",
    "keyring": "call('keyctl', 11, -3, 0, 0)",
    "add_key": "call('add_key', b'user', b'x', b'x', 1, -3)",
    "request_key": "has_right('request_key', b'user', v['name'].encode(), None, -3)",
    "environment": "dict(os.environ) or any(v['secret'] in value for value in os.environ.values())",
    "descriptors": "[fd for fd in range(4, 1024) if os.path.exists(fd)]",
    # Parts of the kernel.
    "bpf": "has_right('bpf', 0, 0, 0)",
    "io_uring": "has_right('io_uring_setup', 1, 0)",
    "perf": "has_right('perf_event_open', 0, 0, -1, -1, 0)",
    "userfaultfd": "call('userfaultfd', 1)",
    "kernel_log": "call('syslog', 10, 0, 0)",
}
# Work for every user where nothing forbids them, and harm nothing but the victims; each group has
# its own.
WORK_OUTSIDE = (
    (
        *("terminal", "fifo", "token", "token_by_symlink", "home", "repository", "users", "proc"),
        *("environment_of_others", "sys", "other_devices", "write_outside", "mode_outside"),
        *("times_outside", "fork", "subprocess", "exec", "threads", "tcp", "udp", "netlink"),
        *("unix_datagram", "abstract_datagram", "sysv_memory", "posix_queue", "pidfd"),
        *("uncounted_memory", "shared_memory_files", "limit_of_others", "priority_of_others"),
        *("descriptors_of_its_own", "thread_with_descriptors_of_its_own"),
    ),
    ("owner_signal",),
    ("signal",),
)


class Victims:
    """What is attacked, of every kind; it belongs to the user who attacks."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._name = "victim-" + secrets.token_hex(8)
        self._process = subprocess.Popen(["sleep", "600"], env={"TOKEN": SECRET})
        self._file = folder / "file"
        self._file.write_text("before")
        home = folder / "home"
        (home / ".ssh").mkdir(parents=True)
        token = home / "token"
        token.write_text(SECRET)
        self._fifo, self._fifo_path = _fifo(folder / "fifo")
        self._terminal, slave = pty.openpty()
        self._stack.callback(os.close, slave)
        self._stack.callback(os.close, self._terminal)
        self._stack.callback(os.close, self._fifo)
        self._sockets = [
            self._listening(socket.AF_UNIX, socket.SOCK_DGRAM, str(folder / "datagrams")),
            self._listening(socket.AF_UNIX, socket.SOCK_DGRAM, "\0" + self._name),
            self._listening(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            self._listening(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        ]
        key = secrets.randbits(30)
        segment = LIBC.shmget(key, 16, 0o1600)
        self._stack.callback(LIBC.shmctl, segment, 0, None)  # IPC_RMID
        queue = LIBC.mq_open(b"/" + self._name.encode(), os.O_CREAT | os.O_RDWR, 0o600, None)
        self._stack.callback(LIBC.mq_unlink, b"/" + self._name.encode())
        assert segment >= 0 and queue >= 0, (segment, queue)
        self._stack.callback(os.close, queue)
        self._disk = folder / "disk"
        self._disk.write_bytes(bytes(2**20))
        self.names = {
            "calls": _numbers(),
            "datagrams": self._sockets[0].getsockname(),
            "file": str(self._file),
            "fifo": self._fifo_path,
            "home": str(home),
            "host": socket.gethostname(),
            "key": key,
            "loop": self._loop(),
            "name": self._name,
            "pid": self._process.pid,
            "port": self._sockets[3].getsockname()[1],
            "secret": SECRET,
            "segment": segment,
            "source": str(REPO / "hybridrl/rewards/code.py"),
            "terminal": os.ttyname(slave),
            "token": str(token),
            "udp_port": self._sockets[2].getsockname()[1],
        }
        self._before = self._state()

    def harmed(self) -> list[str]:
        """The names of what is not as it was."""
        before, after = self._before, self._state()
        return [name for name in before if before[name] != after[name]]

    def end(self) -> None:
        """Remove them all."""
        self._process.kill()
        self._process.wait()
        self._stack.close()
        Path("/dev/shm", self._name).unlink(missing_ok=True)

    def _state(self) -> dict[str, object]:
        status = self._file.stat() if self._file.exists() else None
        pid = self._process.pid
        is_alive = self._process.poll() is None
        return {
            "process": is_alive,
            "limit": is_alive and Path(f"/proc/{pid}/limits").read_text(),
            "priority": is_alive and os.getpriority(os.PRIO_PROCESS, pid),
            "file": status and (self._file.read_text(), status.st_mode, status.st_mtime),
            "flags": _inode_flags(self._file),
            "library": _inode_flags(Path(os.__file__)),
            "fifo": _waiting(self._fifo),
            "terminal": _waiting(self._terminal),
            "sockets": [_waiting(own.fileno()) for own in self._sockets],
            "disk": self._disk.read_bytes(),
            "shared memory": Path("/dev/shm", self._name).exists(),
        }

    def _listening(self, family: int, kind: int, address: object) -> socket.socket:
        own = self._stack.enter_context(socket.socket(family, kind))
        own.bind(address)
        if kind == socket.SOCK_STREAM:
            own.listen()
        return own

    def _loop(self) -> str:
        """A loop device for root, where there is one; else a name that leads nowhere."""
        if os.geteuid() != 0 or shutil.which("losetup") is None:
            return "/dev/none"
        call = ["losetup", "--find", "--show", str(self._disk)]
        done = subprocess.run(call, capture_output=True, text=True)
        if done.returncode != 0:
            return "/dev/none"
        self._stack.callback(subprocess.run, ["losetup", "--detach", done.stdout.strip()])
        return done.stdout.strip()


def _fifo(path: Path) -> tuple[int, str]:
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK), str(path)


def _waiting(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def _inode_flags(path: Path) -> bytes:
    if not path.exists():
        return b""
    with path.open() as file:
        try:
            return fcntl.ioctl(file, 0x80086601, bytes(8))
        except OSError as error:
            return str(error).encode()


def _numbers() -> dict[str, int]:
    library = ctypes.CDLL("libseccomp.so.2")
    return {name: library.seccomp_syscall_resolve_name(name.encode()) for name in CALLS}


def attack(names: dict[str, object], attacks: list[str], isolation: Isolation) -> list[Outcome]:
    """Make attacks, each as the test of one program; one that works or breaks anything fails."""
    program = PRELUDE.replace("{victims!r}", repr(json.dumps(names)))
    cases = [
        Case(
            statements=f"try: worked = {ATTACKS[name]}\nexcept OSError: worked = None\n"
            "assert not worked"
        )
        for name in attacks
    ]
    limits = Limits(seconds_per_test=5.0, seconds=100.0, memory_mb=16384, file_mb=16)
    return run_tests(program, cases, limits, isolation)


def main(isolation: Isolation) -> None:
    """Print the outcome of each attack and what was harmed."""
    outcomes, harmed = {}, []
    groups = [list(ATTACKS)] if isolation is Isolation.bubblewrap else WORK_OUTSIDE
    for attacks in groups:
        victims = Victims()
        found = attack(victims.names, list(attacks), isolation)
        outcomes |= dict(zip(attacks, found, strict=True))
        harmed += victims.harmed()
        victims.end()
    print(json.dumps({"outcomes": outcomes, "harmed": harmed}))


if __name__ == "__main__":
    main(Isolation(sys.argv[1]))
