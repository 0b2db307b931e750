"""Rules for environment variables that break a run, slow it down or contradict each other.

Sources: NCCL's and PyTorch's pages on their environment variables, Ray's on its debugger, and the
code of Ray (util/rpdb.py, _private/ray_constants.py) and torch (ProcessGroupNCCL.cpp).
"""

import re
from collections.abc import Iterator, Mapping

from hybridrl.config.choices import Accelerator, SleepMode
from hybridrl.config.planner.machine import ALLOCATORS
from hybridrl.config.schema import RunConfig
from hybridrl.doctor.findings import (
    Finding,
    Rule,
    apply,
    fail,
    first,
    ok,
    severity,
    skipped,
    warn,
    warns_if,
)
from hybridrl.doctor.host.facts import HostFacts

Environment = Mapping[str, str]

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
ON = ("1", "true", "yes", "on", "y")
ANY = ()

# Variable, bad values in lower case (ANY: all but empty), effect.
BadVariable = tuple[str, tuple[str, ...], str]
THROUGH_HOST = "slow: GPUs of a node exchange data through host memory"
NO_WATCHDOG = "torch starts no watchdog: no error handling, and no flight recorder if a rank hangs"
OF_GPUS: tuple[BadVariable, ...] = (
    ("NCCL_P2P_DISABLE", ON, THROUGH_HOST),
    ("NCCL_P2P_LEVEL", ("loc", "0"), THROUGH_HOST),
    ("NCCL_SHM_DISABLE", ON, "slow: GPUs without NVLink exchange data over the network"),
    ("NCCL_IB_DISABLE", ON, "NCCL uses TCP even with InfiniBand or RoCE"),
    ("NCCL_NET", ("socket",), "NCCL uses TCP even with InfiniBand or RoCE"),
    ("NCCL_DEBUG", ("trace",), "every NCCL call prints a line"),
    ("CUDA_LAUNCH_BLOCKING", ON, "slow: the host waits for each kernel"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", ANY, "slow: a cudaMalloc for each tensor"),
    ("TORCH_NCCL_BLOCKING_WAIT", ON, NO_WATCHDOG),
    ("NCCL_BLOCKING_WAIT", ON, f"old name of TORCH_NCCL_BLOCKING_WAIT: {NO_WATCHDOG}"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("0",), "a rank waits forever for a dead peer"),
)
ALWAYS: tuple[BadVariable, ...] = (
    ("TORCH_DISTRIBUTED_DEBUG", ("detail",), "slow: ranks compare every collective"),
    ("RAY_DEBUG_POST_MORTEM", ("1",), "a failed task waits for a debugger, so the run hangs"),
    ("RAY_DEBUG", ("legacy",), "Ray's old debugger: VS Code cannot attach"),
    ("RAY_PDB", ANY, "this Ray ignores it: use RAY_DEBUG"),
)
NO_COMPILE = "fsdp.compile = true has no effect; or set fsdp.compile=false"
OF_COMPILE: tuple[BadVariable, ...] = (
    ("TORCH_COMPILE_DISABLE", ON, NO_COMPILE),
    ("TORCHDYNAMO_DISABLE", ON, NO_COMPILE),
)
OPPOSITES = {
    "TORCH_NCCL_BLOCKING_WAIT": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "NCCL_ASYNC_ERROR_HANDLING",
    "RAY_DEBUG": "RAY_DEBUG_POST_MORTEM",
    "RAY_PDB": "RAY_DEBUG",
}


def judge_variables(
    facts: Mapping[str, HostFacts], driver: Environment, config: RunConfig
) -> list[Finding]:
    """Judge host.variables of each node, the first with the environment of the driver."""
    findings: list[Finding] = []
    for node, fact in facts.items():
        rules = [*_bad_values(fact.environment, config), _niceness(fact.niceness)]
        if not findings:
            rules += _of_driver(driver, fact.cores, config)
        findings += apply("host.variables", node, rules, "no harmful variable is set")
    return findings


def _bad_values(environment: Environment, config: RunConfig) -> Iterator[Rule]:
    of_gpus = OF_GPUS if config.hardware.accelerator is Accelerator.gpu else ()
    of_compile = OF_COMPILE if config.fsdp.compile else ()
    for name, bad, effect in (*ALWAYS, *of_gpus, *of_compile):
        value, other = environment.get(name, ""), OPPOSITES.get(name, "")
        opposite = environment.get(other, "0")
        contradiction = "" if opposite in ("", "0") else f"; it contradicts {other}={opposite}"
        verdict = warns_if(value and (not bad or value.strip().lower() in bad))
        yield verdict, f"{name}={value}: {effect}{contradiction}", f"unset {name}"


def _niceness(niceness: int) -> Rule:
    """Return the rule for the niceness of worker processes; Ray's default is 15."""
    return (
        warns_if(niceness > 0),
        f"worker processes have niceness {niceness}: any other program on the node takes nearly "
        "all of the cores",
        "export RAY_worker_niceness=0 before `ray start` on each node, and start without nice",
    )


def _of_driver(driver: Environment, cores: int, config: RunConfig) -> list[Rule]:
    """Return the rules for the process that starts the run."""
    size, rank = driver.get("WORLD_SIZE", ""), driver.get("RANK", "")
    slots = config.cluster.gpus_per_node
    assert slots is not None
    by_torchrun = "TORCHELASTIC_RUN_ID" in driver
    launched = by_torchrun or bool(size.isdigit() and int(size) > 1 and rank)
    few = driver.get("OMP_NUM_THREADS") == "1" and cores >= 2 * slots
    return [
        (
            warns_if(launched),
            f"RANK={rank}, WORLD_SIZE={size} of {'torchrun' if by_torchrun else 'a launcher'}: "
            "each rank would be a run of its own",
            "Start hybridrl once, without a launcher; left over: unset RANK WORLD_SIZE LOCAL_RANK "
            "TORCHELASTIC_RUN_ID MASTER_ADDR MASTER_PORT",
        ),
        (
            warns_if(few),
            f"OMP_NUM_THREADS=1: each of {slots} workers uses one core, the node has {cores}",
            "unset OMP_NUM_THREADS",
        ),
    ]


def judge_visible(node: str, environment: Environment, config: RunConfig) -> Finding:
    """Judge host.visible_devices: contradictions; host.gpus finds the GPUs that a value hides."""
    given = {name: environment[name] for name in VISIBLE if name in environment}
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    on_gpu = config.hardware.accelerator is Accelerator.gpu
    unused = "" if on_gpu else " (hardware = cpu: not used)"
    differ = len(set(given.values())) > 1
    alone = VISIBLE[2] in given and VISIBLE[1] not in given
    rules: list[Rule] = [
        (
            severity(on_gpu and differ, differ),
            f"{text}: values differ, and trainer and vLLM read different variables{unused}",
            "set only CUDA_VISIBLE_DEVICES on NVIDIA, only HIP_VISIBLE_DEVICES on AMD",
        ),
        (
            severity(on_gpu and alone, alone),
            f"{text}: Ray refuses to start with {VISIBLE[2]}{unused}",
            f"unset {VISIBLE[2]}, and set {VISIBLE[1]}",
        ),
    ]
    return first("host.visible_devices", node, rules, text or "none is set: every GPU is visible")


def judge_allocator(node: str, environment: Environment, config: RunConfig) -> Finding:
    """Judge host.allocator.

    vLLM's sleep mode uses torch's memory pools, which refuse expandable segments. vLLM turns them
    off for its pool if PYTORCH_CUDA_ALLOC_CONF, and no other variable, sets them.
    """
    check, sleep = "host.allocator", config.rollout.sleep
    if config.hardware.accelerator is not Accelerator.gpu:
        return skipped(check, node, "hardware = cpu: no CUDA allocator, and vLLM does not sleep")
    pattern = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
    given = {name: environment.get(name, "") for name in ALLOCATORS}
    given = {name: value for name, value in given.items() if pattern.search(value)}
    if not given or sleep is SleepMode.none:
        return ok(check, node, f"no expandable segments, or no sleep (rollout.sleep = {sleep})")
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    seen = "expandable_segments:True" in given.get(ALLOCATORS[0], "")
    effect = "vLLM's memory pool fails (MemPool doesn't currently support expandable_segments)"
    if seen:
        effect = "vLLM turns it off for its memory pool: not tested"
    evidence = f"{text} with rollout.sleep = {sleep}: {effect}"
    advice = f"unset {' '.join(given)}, or rollout.sleep=none"
    return (warn if seen else fail)(check, node, evidence, advice)


def judge_terminal(driver: str, environment: Environment, *, buffered: bool) -> Finding:
    """Judge host.terminal of the driver's process; hybridrl's own commands do not buffer."""
    job = environment.get("SLURM_JOB_ID")
    if job and buffered:
        evidence = f"output of Slurm job {job} is buffered: its end is lost if the job is killed"
        advice = "Add export PYTHONUNBUFFERED=1 to the batch script, or use python -m hybridrl.main"
        return warn("host.terminal", driver, evidence, advice)
    where = f"Slurm job {job}" if job else "not under Slurm"
    passed = f"{where}, output {'buffered' if buffered else 'line by line'}"
    return ok("host.terminal", driver, passed)
