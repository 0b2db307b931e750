"""Commands of a cluster, played by scripts on PATH: two nodes, both of them this machine.

Slurm's and ssh's stubs run what they are given here, once for each node; `ip` and `getent` tell
each node its own address (127.0.1.<number>), `ray` and `python` note how they are called. Variables
ask for faults: DEAD, NO_RAY and BROKEN_RAY name a node, DOCTOR_CODE is the doctor's exit code.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
# Where nothing may be left out.
IN_CI = os.environ.get("CI") == "true"

NODE = "${NODE_NAME:-${SLURMD_NODENAME:?}}"
STUBS = {
    "sbatch": """
while [[ $1 == --* ]]; do
  case $1 in --nodes=*) count=${1#*=} ;; esac
  shift
done
cp "$1" "$STUB/slurm_script"
export SLURM_JOB_ID=4711 SLURM_SUBMIT_DIR=$PWD SLURM_JOB_NODELIST="node[1-$count]"
export SLURM_JOB_CPUS_PER_NODE=${CPUS:-2(x$count)} SLURM_CPUS_ON_NODE=${CPUS:-2}
SLURM_CPUS_ON_NODE=${SLURM_CPUS_ON_NODE%%[,(]*}
export SLURMD_NODENAME=node1 SLURM_GPUS_ON_NODE=${GPUS_1:-0}
exec bash "$STUB/slurm_script" "${@:2}"
""",
    "scontrol": """
if [ "$1" = requeue ]; then
  echo "requeued $2, Ray ended: $(ls "$STUB" | grep -c ray_ended)"
  exit
fi
[ "$1 $2" = "show hostnames" ] || exit 64
[[ $3 =~ \\[1-([0-9]+)\\] ]]
for ((i = 1; i <= BASH_REMATCH[1]; i++)); do echo "node$i"; done
""",
    "srun": """
exec "$REAL_PYTHON" "$STUB/srun.py" "$@"
""",
    "ssh": """
while [ "$1" = -o ]; do shift 2; done
echo "$*" >>"$STUB/ssh_calls"
if [ "$1" = "${DEAD:-}" ]; then
  echo "ssh: connect to host $1 port 22: No route to host" >&2
  exit 255
fi
exec env -i STUB="$STUB" PATH=/usr/bin:/bin NO_RAY="${NO_RAY:-}" BROKEN_RAY="${BROKEN_RAY:-}" \\
  DOCTOR_CODE="${DOCTOR_CODE:-0}" bash -c "$2"
""",
    "getent": """
[[ "$1 $2" =~ ^ahostsv4\ .*[0-9]$ ]] && echo "127.0.1.${2##*[a-z.]}     STREAM $2"
""",
    "ip": f"""
own=127.0.1.{NODE[:-1]}}}
own=127.0.1.${{own##*node}}
case "$*" in
  "-o -4 route get $own") echo "local $own dev lo table local src $own uid 0 \\\\    cache " ;;
  "-o -4 route get "*) echo "$5 via 10.9.9.9 dev eth${{own##*.}} src $own uid 0 \\\\    cache " ;;
  "-o -4 addr show")
    echo "1: lo    inet 127.0.0.1/8 scope host lo\\\\       valid_lft forever"
    echo "4: eth${{own##*.}}    inet $own/24 brd 1.1.1.1 scope global\\\\       valid_lft 9sec"
    ;;
  *) exit 64 ;;
esac
""",
    "ray": f"""
node={NODE}
printf '%s\\n' "$@" >"$STUB/ray_$node"
env >"$STUB/ray_env_$node"
trap 'touch "$STUB/ray_ended_$node"; kill $child; exit 0' TERM
if [ "$node" != "${{NO_RAY:-}}" ]; then
  [[ " $* " == *" --head "* ]] && listen=1
  echo "127.0.1.${{node##*node}}" >>"$STUB/ray_nodes"
fi
if [ "$node" = "${{BROKEN_RAY:-}}" ]; then echo "ray broke"; exit 1; fi
"$REAL_PYTHON" "$STUB/listen.py" ${{listen:+127.0.1.1 "$HYBRIDRL_RAY_PORT"}} &
child=$!
wait $child
""",
    "python": f"""
case "$1 $2" in
  "-m hybridrl.doctor")
    echo "$*" >"$STUB/doctor_{NODE}"
    [ ! -e "$STUB/ray_nodes" ] || echo "after ray" >>"$STUB/doctor_{NODE}"
    exit "${{DOCTOR_CODE:-0}}"
    ;;
  "-m hybridrl.main") echo "$*" >"$STUB/main" ;;
  *) PYTHONPATH=$STUB exec "$REAL_PYTHON" "$@" ;;
esac
""",
}
# Ends all tasks when one fails, and on SIGTERM; the exit code is the highest.
SRUN = """
import os, signal, subprocess, sys, threading
options = [text for text in sys.argv if text.startswith("--")]
command = sys.argv[sys.argv.index("bash") :]
for needed in ("--overlap", "--kill-on-bad-exit=1", "--label"):
    if needed not in options[:10]:
        sys.exit(f"srun: without {needed}")
cpus = os.environ["SLURM_JOB_CPUS_PER_NODE"].split(",")
(wanted,) = (int(text.partition("=")[2]) for text in options if text.startswith("--cpus-per-task="))
if wanted > min(int(text.partition("(")[0]) for text in cpus):
    sys.exit("srun: error: Unable to create step: More processors requested than permitted")
with open(os.environ["STUB"] + "/cpus_per_task", "w") as file:
    file.write(str(wanted))
(count,) = (int(text.partition("=")[2]) for text in options if text.startswith("--ntasks="))
tasks, threads, code = [], [], 0
def end(*signal_and_frame):
    for task in tasks:
        task.terminate()
def watch(number, task):
    for line in task.stdout:
        print(f"{number}: {line}", end="", flush=True)
    if task.wait():
        end()
signal.signal(signal.SIGTERM, end)
for number in range(count):
    name = f"node{number + 1}"
    if name == os.environ.get("DEAD"):
        print(f"srun: error: Task launch for StepId=4711.0 failed on node {name}", flush=True)
        code = 1
        continue
    gpus = os.environ.get(f"GPUS_{number + 1}", "0")
    own = dict(SLURM_PROCID=str(number), SLURMD_NODENAME=name, SLURM_GPUS_ON_NODE=gpus)
    task = subprocess.Popen(
        command, env=os.environ | own, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    tasks.append(task)
    threads.append(threading.Thread(target=watch, args=(number, task)))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(max([code, *(abs(task.returncode) for task in tasks)]))
"""
LISTEN = """
import socket, sys, time
if sys.argv[1:]:
    server = socket.create_server((sys.argv[1], int(sys.argv[2])))
time.sleep(60)
"""
# What wait_for_nodes.py asks of Ray.
RAY_MODULE = """
import os
from pathlib import Path
def init(address, **kwargs): pass
def nodes():
    file = Path(os.environ["STUB"]) / "ray_nodes"
    lines = file.read_text().split() if file.exists() else []
    return [{"NodeManagerAddress": line, "Alive": True} for line in lines]
"""


@dataclass
class Cluster:
    """Stubs in a folder, and a checkout in which commands are given.

    Attributes:
        folder: what stubs note, one file a thing.
        checkout: the current directory; deploy/ lies in it.
        environment: of commands.
    """

    folder: Path
    checkout: Path
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Give a command, output and errors together."""
        return subprocess.Popen(
            command,
            cwd=self.checkout,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, **environment: str) -> tuple[int, str]:
        """Exit code and output of a command."""
        process = self.start(*command, **environment)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def noted(self, name: str) -> str:
        """What a stub noted."""
        return (self.folder / name).read_text()

    def ray_environment(self, node: str) -> dict[str, str]:
        """The environment in which a node's Ray was started."""
        lines = self.noted(f"ray_env_{node}").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


def tool(name: str) -> str | None:
    """A linter that pip has installed beside this Python; None if it has not."""
    return shutil.which(name, path=Path(sys.executable).parent)


def make_cluster(tmp_path: Path) -> Cluster:
    """Two nodes, of which nothing is running yet."""
    folder, checkout = tmp_path / "stub", tmp_path / "checkout"
    (folder / "bin").mkdir(parents=True)
    (folder / "ray").mkdir()
    checkout.mkdir()
    (checkout / "deploy").symlink_to(REPO / "deploy")
    for name, text in STUBS.items():
        script = folder / "bin" / name
        # What runs through ssh begins with an empty environment.
        known = f"STUB={folder}\nREAL_PYTHON={sys.executable}\nexport STUB\n"
        script.write_text("#!/bin/bash\n" + known + text)
        script.chmod(0o755)
    (folder / "srun.py").write_text(SRUN)
    (folder / "listen.py").write_text(LISTEN)
    (folder / "ray" / "__init__.py").write_text(RAY_MODULE)
    environment = {
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HYBRIDRL_RAY_PORT": str(free_ports()),
        "HYBRIDRL_RAY_TMP": "/tmp/hybridrl-stub",
        "HYBRIDRL_START_S": "20",
    }
    return Cluster(folder, checkout, environment)


def free_ports() -> int:
    """The first of eight ports that nobody listens on, below those of outgoing connections."""
    first = 20000 + 8 * (os.getpid() % 1000)
    while any(_taken(port) for port in range(first, first + 8)):
        first += 8
    return first


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.1.1", port))
        except OSError:
            return True
    return False


def ended_by(process: subprocess.Popen[str], signum: signal.Signals) -> tuple[int, str]:
    """Send a signal; exit code and output."""
    process.send_signal(signum)
    output, _ = process.communicate(timeout=30)
    return process.returncode, output
