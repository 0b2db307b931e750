"""Check host.gpus: the GPUs by nvidia-smi against those that CUDA shows to a process."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from hybridrl.config.choices import Accelerator
from hybridrl.config.planner import nvidia_smi
from hybridrl.config.schema import RunConfig
from hybridrl.doctor.findings import (
    Finding,
    Rule,
    Verdict,
    apply,
    fail,
    fails_if,
    skipped,
    warns_if,
)

LOOK_S = 60.0
FIELDS = "uuid,name,driver_version,memory.total,memory.free,ecc.errors.uncorrected.volatile.total"
OF_PROCESS = "gpu_uuid,pid,process_name,used_memory"
# A separate query: drivers have two names for it.
THROTTLE = ("clocks_event_reasons", "clocks_throttle_reasons")
# Program that prints the UUIDs of the GPUs visible to CUDA, without torch.
LOOK = """
import ctypes, json, uuid
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    if code := getattr(cuda, name)(*arguments):
        raise SystemExit(f"{name} returned {code}")
call("cuInit", 0)
count, device, raw, found = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)(), []
call("cuDeviceGetCount", ctypes.byref(count))
for index in range(count.value):
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDeviceGetUuid", raw, device)
    found.append(f"GPU-{uuid.UUID(bytes=bytes(raw))}")
print(json.dumps(found))
"""


class Smi(NamedTuple):
    """A GPU by nvidia-smi: uncorrected ECC errors since boot, slowed by heat or a power brake."""

    uuid: str
    name: str
    driver: str
    total_mib: int
    free_mib: int
    ecc_errors: int
    slowed: bool


class GPUProcess(NamedTuple):
    """A process on a GPU, and its memory in MiB, as nvidia-smi prints it."""

    uuid: str
    pid: str
    name: str
    used_mib: str


class GPUFacts(NamedTuple):
    """GPUs by nvidia-smi (None without it), and UUIDs that CUDA shows to a child process."""

    smi: list[Smi] | None
    error: str = ""
    seen: tuple[str, ...] = ()
    look_error: str = ""
    visible: str | None = None
    processes: Sequence[GPUProcess] = ()


def gpu_facts(speed: bool = True, processes: bool = False) -> GPUFacts:
    """Query the GPUs of this node; `speed` and `processes` add a query each."""
    with ThreadPoolExecutor(1) as meanwhile:  # each takes a second without NVIDIA's daemon
        looking = meanwhile.submit(_look)
        text, error = nvidia_smi.ask(FIELDS)
        if error:
            return GPUFacts(None, error)
        running = nvidia_smi.ask(OF_PROCESS, "compute-apps")[0] if processes else ""
        smi = parse(text, _slowed() if speed else [])
        seen, look_error = looking.result()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return GPUFacts(smi, "", seen, look_error, visible, parse_processes(running))


def _look() -> tuple[tuple[str, ...], str]:
    """Return the UUIDs of the GPUs that CUDA shows to a process, or why it shows none."""
    look = [sys.executable, "-c", LOOK]
    try:
        child = subprocess.run(look, capture_output=True, text=True, timeout=LOOK_S, check=True)
    except subprocess.TimeoutExpired:
        return (), f"no answer within {LOOK_S:g} s"
    except subprocess.CalledProcessError as failure:
        return (), "".join(failure.stderr.strip().splitlines()[-1:])
    return tuple(json.loads(child.stdout)), ""


def parse_processes(text: str) -> list[GPUProcess]:
    """Parse lines 'UUID, pid, name, MiB'."""
    lines = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [GPUProcess(*parts) for parts in lines if len(parts) == len(GPUProcess._fields)]


def parse(text: str, slowed: list[bool]) -> list[Smi]:
    """Parse lines of `FIELDS`; GPUs without numbers, as under MIG, are left out."""
    gpus = []
    for index, line in enumerate(text.splitlines()):
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == FIELDS.count(",") + 1 and parts[3].isdigit() and parts[4].isdigit():
            uuid, name, driver, total, free, ecc = parts
            is_slowed = slowed[index : index + 1] == [True]
            errors = int(ecc) if ecc.isdigit() else 0
            gpus.append(Smi(uuid, name, driver, int(total), int(free), errors, is_slowed))
    return gpus


def _slowed() -> list[bool]:
    """Query which GPUs are slowed down by heat or a power brake."""
    for name in THROTTLE:
        text, error = nvidia_smi.ask(f"{name}.hw_slowdown")
        if not error:
            return [line.strip() == "Active" for line in text.splitlines()]
    return []


def judge_gpus(node: str, facts: GPUFacts, config: RunConfig, slots: int) -> list[Finding]:
    """Judge host.gpus of a node that may get this number of ranks."""
    check = "host.gpus"
    if config.hardware.accelerator is not Accelerator.gpu:
        return [skipped(check, node, "hardware = cpu")]
    if not slots:
        return [skipped(check, node, "no rank of the run is placed here")]
    if facts.smi is None:
        if facts.error == nvidia_smi.NOT_THERE:
            return [skipped(check, node, facts.error)]
        advice = "Read dmesg | grep -i nvrm; a reboot or a new driver may be needed"
        return [fail(check, node, facts.error, advice)]
    rules: list[Rule] = []
    for gpu in facts.smi:
        hot = f"{gpu.name} {gpu.uuid} is slowed down by its hardware (heat or power)"
        faulty = f"{gpu.name} {gpu.uuid} has {gpu.ecc_errors} uncorrected memory errors"
        rules += [
            (warns_if(gpu.slowed), hot, "Read nvidia-smi -q -d PERFORMANCE,TEMPERATURE"),
            (warns_if(gpu.ecc_errors), faulty, "nvidia-smi -q -d ECC; nvidia-smi --gpu-reset"),
        ]
    names = ", ".join(sorted({f"{gpu.name}, driver {gpu.driver}" for gpu in facts.smi}))
    passed = f"{len(facts.smi)} x {names}; a process sees {', '.join(facts.seen)}"
    return apply(check, node, [*rules, _visibility(facts.smi, facts, slots)], passed)


def _visibility(smi: list[Smi], facts: GPUFacts, slots: int) -> Rule:
    """Compare the GPUs that a process sees with those of nvidia-smi and those needed."""
    remedy = "Docker: --gpus all; Slurm: --gpus-per-node; see CUDA_VISIBLE_DEVICES, /dev/nvidia*"
    lists = f"nvidia-smi lists {len(smi)} GPUs"
    if facts.look_error:
        return Verdict.fail, f"{lists}, CUDA none: {facts.look_error}", remedy
    missing = [gpu.uuid for gpu in smi if gpu.uuid not in facts.seen]
    if missing and facts.visible is None:
        return Verdict.fail, f"{lists}, a process sees not {', '.join(missing)}", remedy
    variable = "(unset)" if facts.visible is None else facts.visible
    evidence = f"a process sees {len(facts.seen)} GPUs (CUDA_VISIBLE_DEVICES={variable}), the run "
    evidence += f"wants {slots} here"
    remedy += "; or lower cluster.gpus_per_node or placement.slots_on_nodes"
    return fails_if(len(facts.seen) < slots), evidence, remedy
