"""Environment variables that break a run, slow it down or contradict each other.

Sources: NCCL's and PyTorch's pages on their environment variables, Ray's on its debugger, and the
code of Ray (util/rpdb.py, _private/ray_constants.py) and torch (ProcessGroupNCCL.cpp).
"""

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from hybridrl.config.choices import Accelerator
from hybridrl.config.schema import RunConfig
from hybridrl.doctor.findings import Finding, ok, warn
from hybridrl.doctor.host.facts import HostFacts

Environment = Mapping[str, str]

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
ON = ("1", "true", "yes", "on", "y")


class Trouble(NamedTuple):
    """A variable that is better not set.

    Attributes:
        name: of the variable.
        is_bad: whether a value of it is.
        why: what it does to the run.
        advice: what to do; empty: unset it.
    """

    name: str
    is_bad: Callable[[str], bool]
    why: str
    advice: str = ""


def _is_on(value: str) -> bool:
    return value.strip().lower() in ON


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in values


def _is_set(value: str) -> bool:
    return bool(value)


OF_GPUS = (
    Trouble("NCCL_P2P_DISABLE", _is_on, "GPUs of a node exchange data through host memory: slow"),
    Trouble("NCCL_P2P_LEVEL", _is("loc", "0"), "GPUs of a node exchange data through host memory"),
    Trouble("NCCL_SHM_DISABLE", _is_on, "GPUs without NVLink exchange data over the network"),
    Trouble("NCCL_IB_DISABLE", _is_on, "NCCL uses TCP even where there is InfiniBand or RoCE"),
    Trouble("NCCL_NET", _is("socket"), "NCCL uses TCP even where there is InfiniBand or RoCE"),
    Trouble(
        "NCCL_DEBUG",
        _is("trace"),
        "every NCCL call writes a line",
        "Set NCCL_DEBUG=WARN, or INFO to look at how NCCL connects",
    ),
    Trouble("CUDA_LAUNCH_BLOCKING", _is_on, "each kernel is waited for: good for debugging alone"),
    Trouble("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_set, "each tensor is a cudaMalloc: slow"),
    Trouble(
        "TORCH_NCCL_BLOCKING_WAIT",
        _is_on,
        "torch starts no watchdog then: no error handling as of TORCH_NCCL_ASYNC_ERROR_HANDLING, "
        "no flight recorder when a rank hangs",
    ),
    Trouble(
        "NCCL_BLOCKING_WAIT",
        _is_on,
        "old name of TORCH_NCCL_BLOCKING_WAIT; torch starts no watchdog then, and no flight "
        "recorder when a rank hangs",
    ),
    Trouble(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _is("0"),
        "a rank whose peer has died waits for it instead of ending",
    ),
)
ALWAYS = (
    Trouble(
        "TORCH_DISTRIBUTED_DEBUG",
        _is("detail"),
        "ranks compare notes before each collective: slow",
        "Set TORCH_DISTRIBUTED_DEBUG=INFO, or unset it",
    ),
    Trouble(
        "RAY_DEBUG_POST_MORTEM",
        _is("1"),
        "a task that fails stays and waits for a debugger, so a failed run does not end",
    ),
    Trouble(
        "RAY_DEBUG",
        _is("legacy"),
        "Ray's old debugger; the one of VS Code cannot attach then",
    ),
    Trouble("RAY_PDB", _is_set, "this Ray does not read it: RAY_DEBUG took its place"),
)


def judge_variables(
    facts: Mapping[str, HostFacts], driver: Environment, config: RunConfig
) -> list[Finding]:
    """host.variables of each node.

    Args:
        facts: by node, the driver's first.
        driver: the environment of the process that starts the run; what Ray sets in its own
            processes is not in it.
        config: of the run.
    """
    found: list[Finding] = []
    addresses = {node: fact.address for node, fact in facts.items()}
    for index, (node, fact) in enumerate(facts.items()):
        others = [address for other, address in addresses.items() if other != node]
        problems = [*_troubles(node, fact.environment, config), *_proxies(node, fact, others)]
        if index == 0:
            problems += [*_launched(node, driver), *_threads(node, driver, fact.cores, config)]
        found += problems or [ok("host.variables", node, "none that is known to make trouble")]
    return found


def _troubles(node: str, environment: Environment, config: RunConfig) -> Iterator[Finding]:
    """What is set and better was not."""
    on_gpu = config.hardware.accelerator is Accelerator.gpu
    for trouble in (*ALWAYS, *OF_GPUS) if on_gpu else ALWAYS:
        value = environment.get(trouble.name)
        if value is not None and trouble.is_bad(value):
            evidence = f"{trouble.name}={value}: {trouble.why}{_beside(trouble.name, environment)}"
            advice = trouble.advice or f"unset {trouble.name}"
            yield warn("host.variables", node, evidence, advice)
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE") if config.fsdp.compile else ():
        if _is_on(environment.get(name, "")):
            evidence = f"{name}={environment[name]}: fsdp.compile = true has no effect"
            yield warn("host.variables", node, evidence, f"unset {name}, or fsdp.compile=false")


def _beside(name: str, environment: Environment) -> str:
    """What else is set and says the opposite."""
    opposites = {
        "TORCH_NCCL_BLOCKING_WAIT": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_BLOCKING_WAIT": "NCCL_ASYNC_ERROR_HANDLING",
        "RAY_DEBUG": "RAY_DEBUG_POST_MORTEM",
        "RAY_PDB": "RAY_DEBUG",
    }
    other = opposites.get(name, "")
    value = environment.get(other, "0")
    return "" if value in ("", "0") else f"; it contradicts {other}={value}"


def _launched(node: str, driver: Environment) -> Iterator[Finding]:
    """A launcher of ranks around the driver, or what one has left in the environment."""
    size, rank = driver.get("WORLD_SIZE", ""), driver.get("RANK", "")
    by_torchrun = "TORCHELASTIC_RUN_ID" in driver
    if by_torchrun or (size.isdigit() and int(size) > 1 and rank):
        launcher = "torchrun's" if by_torchrun else "a launcher's"
        yield warn(
            "host.variables",
            node,
            f"RANK={rank}, WORLD_SIZE={size}: {launcher}, or left over from one; hybridrl starts "
            f"its processes by itself, and each of these would be a run of its own",
            "Start hybridrl once, without a launcher; if these are left over: unset RANK "
            "WORLD_SIZE LOCAL_RANK TORCHELASTIC_RUN_ID MASTER_ADDR MASTER_PORT",
        )


def _threads(node: str, driver: Environment, cores: int, config: RunConfig) -> Iterator[Finding]:
    slots = config.cluster.gpus_per_node
    assert slots is not None
    if driver.get("OMP_NUM_THREADS") == "1" and cores >= 2 * slots:
        yield warn(
            "host.variables",
            node,
            f"OMP_NUM_THREADS=1 (torchrun and some clusters set it): torch uses one core in each "
            f"of {slots} workers, the node has {cores}",
            "unset OMP_NUM_THREADS",
        )


def _proxies(node: str, facts: HostFacts, others: list[str]) -> Iterator[Finding]:
    """A proxy for HTTP that the other nodes' addresses are not taken out of."""
    lower = {name.lower(): value for name, value in facts.environment.items()}
    through = [name for name in PROXIES if lower.get(name)]
    direct = lower.get("no_proxy", "")
    reachable = [address for address in others if address and not address.startswith("127.")]
    uncovered = [address for address in reachable if not bypasses(address, direct)]
    if not through or not uncovered:
        return
    ray = ""
    if _is_on(lower.get("ray_grpc_enable_http_proxy", "")):
        ray = "; Ray's own connections, too (RAY_grpc_enable_http_proxy)"
    more = f" and {len(uncovered) - 3} more" if len(uncovered) > 3 else ""
    yield warn(
        "host.variables",
        node,
        f"{' and '.join(through)} set, and no_proxy={direct or '(unset)'} leaves out "
        f"{', '.join(uncovered[:3])}{more}: HTTP between nodes (Ray's dashboard and jobs, a reward "
        f"server) goes through the proxy{ray}",
        f"export no_proxy=localhost,127.0.0.1,{','.join(uncovered[:8])} NO_PROXY=$no_proxy, "
        f"on all nodes",
    )


def bypasses(address: str, no_proxy: str) -> bool:
    """Whether no_proxy covers an IP address: by itself, * or a network (10.0.0.0/8)."""
    for entry in (part.strip() for part in no_proxy.split(",")):
        if entry == "*":
            return True
        try:
            network = ipaddress.ip_network(entry, strict=False)
        except ValueError:
            continue
        if ipaddress.ip_address(address) in network:
            return True
    return False
