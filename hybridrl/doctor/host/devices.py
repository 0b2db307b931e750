"""Environment variables that decide which GPUs a process sees, and how torch takes their memory."""

import re
from collections.abc import Mapping

from hybridrl.config.choices import Accelerator, SleepMode
from hybridrl.config.schema import RunConfig
from hybridrl.doctor.findings import Finding, fail, ok, skipped, warn

Environment = Mapping[str, str]

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def judge_visible(
    node: str, environment: Environment, gpus: tuple[str, ...] | None, config: RunConfig
) -> Finding:
    """host.visible_devices.

    Args:
        node: its name.
        environment: of the node's processes.
        gpus: UUIDs of all its GPUs; None where that is not known.
        config: of the run.
    """
    check = "host.visible_devices"
    given = {name: environment[name] for name in VISIBLE if name in environment}
    if not given:
        return ok(check, node, "none is set: every GPU is visible")
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    evidence, advice = _problem(given, gpus)
    if not evidence:
        return ok(check, node, text)
    if config.hardware.accelerator is not Accelerator.gpu:
        return warn(check, node, f"{text}: {evidence} (hardware = cpu: not used)", advice)
    return fail(check, node, f"{text}: {evidence}", advice)


def _problem(given: Environment, gpus: tuple[str, ...] | None) -> tuple[str, str]:
    """What is wrong with the variables that are set, and what to do; empty if nothing is."""
    if len(set(given.values())) > 1:
        return (
            "trainer and vLLM go by different ones, and each narrows what the other leaves",
            "NVIDIA: set CUDA_VISIBLE_DEVICES alone; AMD: set HIP_VISIBLE_DEVICES alone (or "
            "CUDA_VISIBLE_DEVICES to the same)",
        )
    if "ROCR_VISIBLE_DEVICES" in given and "HIP_VISIBLE_DEVICES" not in given:
        advice = "Set HIP_VISIBLE_DEVICES in its place: unset ROCR_VISIBLE_DEVICES"
        return "Ray refuses to start with it", advice
    problem = _entries_problem(next(iter(given.values())), gpus)
    return problem, f"unset {' '.join(given)}, or name GPUs" if problem else ""


def _entries_problem(value: str, gpus: tuple[str, ...] | None) -> str:
    """Why not all entries name a GPU; the first that names none hides those after it."""
    entries = [entry.strip() for entry in value.split(",")]
    if value.strip() in ("", "-1", "NoDevFiles"):
        return "it hides every GPU"
    if len(set(entries)) < len(entries):
        return "a GPU is named twice, and CUDA then shows none"
    for entry in entries if gpus is not None else ():
        assert gpus is not None
        named = int(entry) < len(gpus) if entry.isdigit() else _is_uuid(entry, gpus)
        if not named:
            what = entry or "an empty entry"
            return f"{what} is none of the node's {len(gpus)} GPUs, and hides those after it"
    return ""


def _is_uuid(entry: str, gpus: tuple[str, ...]) -> bool:
    return entry.startswith("MIG-") or (bool(entry) and any(u.startswith(entry) for u in gpus))


def judge_allocator(node: str, environment: Environment, config: RunConfig) -> Finding:
    """host.allocator.

    torch's memory pools, of which vLLM's sleep is made, refuse expandable segments. vLLM switches
    them off around its pool if PYTORCH_CUDA_ALLOC_CONF, and no other variable, asks for them.
    """
    check = "host.allocator"
    if config.hardware.accelerator is not Accelerator.gpu:
        return skipped(check, node, "hardware = cpu: no CUDA allocator, and vLLM does not sleep")
    asking = {
        name: environment[name]
        for name in ALLOCATORS
        if re.search(r"expandable_segments\s*:\s*true", environment.get(name, ""), re.IGNORECASE)
    }
    sleep = config.rollout.sleep
    if not asking or sleep is SleepMode.none:
        return ok(check, node, f"no expandable segments, or no sleep (rollout.sleep = {sleep})")
    text = ", ".join(f"{name}={value}" for name, value in asking.items())
    advice = f"unset {' '.join(asking)}, or rollout.sleep=none"
    if "expandable_segments:True" in environment.get(ALLOCATORS[0], ""):
        evidence = (
            f"{text} with rollout.sleep = {sleep}: vLLM has to switch it off for its memory pool "
            f"(before 0.25 it refuses it), and hybridrl is not tested with it"
        )
        return warn(check, node, evidence, advice)
    evidence = (
        f"{text} with rollout.sleep = {sleep}: vLLM's memory pool fails (MemPool doesn't currently "
        f"support expandable_segments)"
    )
    return fail(check, node, evidence, advice)
