"""host.gpus: the GPUs by nvidia-smi, against those that CUDA shows to a process of the run.

One process of the run holds trainer and rollout, so that one fresh process stands for both.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from hybridrl.config.choices import Accelerator
from hybridrl.config.planner import nvidia_smi
from hybridrl.config.schema import RunConfig
from hybridrl.doctor.findings import Finding, fail, ok, skipped, warn

LOOK_S = 60.0
FIELDS = (
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "memory.free",
    "ecc.errors.uncorrected.volatile.total",
)
# Asked for by itself, as drivers name it in two ways.
THROTTLE = ("clocks_event_reasons", "clocks_throttle_reasons")
# What a fresh process sees through the driver, without torch: UUIDs as nvidia-smi writes them.
LOOK = """
import ctypes, json, uuid
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        raise SystemExit(f"{name} returned {code}")
call("cuInit", 0)
count = ctypes.c_int()
call("cuDeviceGetCount", ctypes.byref(count))
found = []
for index in range(count.value):
    raw = (ctypes.c_ubyte * 16)()
    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDeviceGetUuid", raw, device)
    found.append(f"GPU-{uuid.UUID(bytes=bytes(raw))}")
print(json.dumps(found))
"""


class Smi(NamedTuple):
    """A GPU by nvidia-smi.

    Attributes:
        total_mib, free_mib: its memory.
        ecc_errors: in its memory, uncorrected, since the driver was loaded; 0 without ECC.
        slowed: whether it runs slower because of heat or too little power.
    """

    uuid: str
    name: str
    driver: str
    total_mib: int
    free_mib: int
    ecc_errors: int
    slowed: bool


class GPUFacts(NamedTuple):
    """The GPUs of a node.

    Attributes:
        smi: all of them; None without nvidia-smi.
        error: why nvidia-smi gives no answer.
        seen: UUIDs that CUDA shows to a process started from here.
        look_error: why it shows none.
        visible: CUDA_VISIBLE_DEVICES; None: unset.
    """

    smi: list[Smi] | None
    error: str = ""
    seen: tuple[str, ...] = ()
    look_error: str = ""
    visible: str | None = None


def gpu_facts(speed: bool = True) -> GPUFacts:
    """The GPUs of this node.

    Args:
        speed: whether to ask nvidia-smi once more, for those that are slowed down.
    """
    text, error = nvidia_smi.ask(",".join(FIELDS))
    if error:
        return GPUFacts(None, error)
    smi = parse(text, _slowed() if speed else [])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        child = subprocess.run(
            [sys.executable, "-c", LOOK],
            capture_output=True,
            text=True,
            timeout=LOOK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return GPUFacts(smi, look_error=f"no answer within {LOOK_S:g} s", visible=visible)
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:]
        return GPUFacts(smi, look_error="".join(last), visible=visible)
    return GPUFacts(smi, seen=tuple(json.loads(child.stdout)), visible=visible)


def parse(text: str, slowed: list[bool]) -> list[Smi]:
    """GPUs from lines of `FIELDS`; those without numbers, as under MIG, are left out."""
    found = []
    for index, line in enumerate(text.splitlines()):
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == len(FIELDS) and parts[3].isdigit() and parts[4].isdigit():
            uuid, name, driver, total, free, ecc = parts
            errors = int(ecc) if ecc.isdigit() else 0
            is_slowed = index < len(slowed) and slowed[index]
            found.append(Smi(uuid, name, driver, int(total), int(free), errors, is_slowed))
    return found


def _slowed() -> list[bool]:
    """Whether each GPU is slowed down by hardware: heat or a power brake."""
    for name in THROTTLE:
        text, error = nvidia_smi.ask(f"{name}.hw_slowdown")
        if not error:
            return [line.strip() == "Active" for line in text.splitlines()]
    return []


def judge_gpus(node: str, facts: GPUFacts, config: RunConfig, slots: int) -> list[Finding]:
    """host.gpus.

    Args:
        node: its name.
        facts: its GPUs.
        config: of the run.
        slots: ranks that the node may get.
    """
    check = "host.gpus"
    if config.hardware.accelerator is not Accelerator.gpu:
        return [skipped(check, node, "hardware = cpu")]
    if not slots:
        return [skipped(check, node, "no rank of the run comes here")]
    if facts.smi is None:
        if facts.error == nvidia_smi.NOT_THERE:
            return [skipped(check, node, facts.error)]
        advice = "Look at dmesg | grep -i nvrm; a reboot or a new driver may be needed"
        return [fail(check, node, facts.error, advice)]
    found = [*_sick(node, facts.smi)]
    found += _seen(node, facts, slots)
    return found or [
        ok(
            check,
            node,
            f"{len(facts.smi)} x {facts.smi[0].name if facts.smi else 'GPU'}, driver "
            f"{facts.smi[0].driver if facts.smi else '?'}; a process sees "
            f"{', '.join(facts.seen)}",
        )
    ]


def _sick(node: str, gpus: list[Smi]) -> Iterator[Finding]:
    """GPUs that run slower than others, or whose memory has errors."""
    for gpu in gpus:
        if gpu.slowed:
            yield warn(
                "host.gpus",
                node,
                f"{gpu.name} {gpu.uuid} is slowed down by its hardware (heat or power)",
                "Look at nvidia-smi -q -d PERFORMANCE,TEMPERATURE; take the node out meanwhile",
            )
        if gpu.ecc_errors:
            yield warn(
                "host.gpus",
                node,
                f"{gpu.name} {gpu.uuid} has {gpu.ecc_errors} uncorrected memory errors",
                "Look at nvidia-smi -q -d ECC,ROW_REMAPPER; nvidia-smi --gpu-reset, or take the "
                "node out",
            )


def _seen(node: str, facts: GPUFacts, slots: int) -> list[Finding]:
    """What a process of the run sees, against what there is and what it needs."""
    check = "host.gpus"
    assert facts.smi is not None
    remedy = (
        "Docker: --gpus all; Slurm: --gpus-per-node=...; look at CUDA_VISIBLE_DEVICES and "
        "ls -l /dev/nvidia*"
    )
    if facts.look_error:
        evidence = f"nvidia-smi lists {len(facts.smi)} GPUs, CUDA none: {facts.look_error}"
        return [fail(check, node, evidence, remedy)]
    listed = [gpu.uuid for gpu in facts.smi]
    missing = [uuid for uuid in listed if uuid not in facts.seen]
    if missing and facts.visible is None:
        evidence = f"nvidia-smi lists {len(listed)} GPUs, a process sees not {', '.join(missing)}"
        return [fail(check, node, evidence, remedy)]
    if len(facts.seen) < slots:
        evidence = (
            f"a process sees {len(facts.seen)} GPUs (CUDA_VISIBLE_DEVICES="
            f"{facts.visible if facts.visible is not None else '(unset)'}), "
            f"the run wants {slots} here"
        )
        lower = "or lower cluster.gpus_per_node or placement.slots_on_nodes"
        return [fail(check, node, evidence, f"{remedy}; {lower}")]
    return []
