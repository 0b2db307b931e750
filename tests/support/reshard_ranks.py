"""What the tests of the resharder run on every rank: random shards, and an engine without vLLM."""

import time
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.distributed.mesh import build_mesh, everyone, init_groups
from hybridrl.distributed.regions import FP8, NamedShard, Region, TracedCopy
from hybridrl.reshard.executor import ReshardError
from hybridrl.reshard.resharder import Resharder
from hybridrl.reshard.route import Route, receiver, sender
from hybridrl.reshard.transfers import SourceLayout
from hybridrl.rollout.trace import trace_loader
from tests.support.role_configs import fsdp_config
from tests.support.toy_engine import SOURCES, ToyEngine, sources

BFLOAT = torch.bfloat16
# What has adapters where some weights have them: parts of fused parameters, and columns.
LIVE = ("q", "v", "o", "up", "experts")
# One of them has adapters.
UNROUNDED = ("norm", "o")
# Parameters that are FP8: several sources in one, columns of one, three dims. Where some weights
# are frozen, those whose sources are frozen together.
QUANTISED = ("qkv", "down", "experts")
WHOLE = ("down", "experts")
LATE_S = 0.5
EXPERTS = (4, 6, 10)  # one more source, with three dims, of which each tp rank takes columns


class FloatEngine(ToyEngine):
    """The toy engine in bfloat16, with the buffer that is loaded, but for two parameters."""

    def __init__(self, rank: int, tp: int) -> None:
        super().__init__(rank, tp)
        for name, parameter in list(self.named_parameters()):
            values = parameter.data.to(torch.float32 if name in UNROUNDED else BFLOAT)
            setattr(self, name, nn.Parameter(values, requires_grad=False))
        self.scales = self.scales.to(BFLOAT)


class Side:
    """One rank's shards and engine.

    Args:
        tp: size of the engine.
        mesh: the training mesh; shards lie in the order of its dp_shard group.
        by_columns: cut what each tp rank takes columns of along dim 1.
        device: of shards and parameters.
        quantised: parameters that are FP8.
    """

    def __init__(
        self,
        tp: int,
        mesh: DeviceMesh,
        by_columns: bool,
        device: str,
        quantised: Collection[str] = QUANTISED,
    ) -> None:
        self.mesh, self.rank = mesh, dist.get_rank(mesh.get_group("dp_shard"))
        shapes = SOURCES | {"experts": EXPERTS}
        columns = ("o", "down") if by_columns else ()
        count = mesh["dp_shard"].size()
        self.layouts = [SourceLayout(n, s, count, int(n in columns)) for n, s in shapes.items()]
        tp_rank = dist.get_rank() % tp
        self.engine = FloatEngine(tp_rank, tp).to(device)
        trace = trace_loader(self.engine, self.engine.load_weights, sources(), BFLOAT)
        self.tensors = self.engine.tensors()
        width = EXPERTS[2] // tp
        self.tensors["experts"] = torch.zeros((*EXPERTS[:2], width), dtype=BFLOAT, device=device)
        slice_ = Region((0, 0, tp_rank * width), (*EXPERTS[:2], width))
        self.trace = trace._replace(
            copies=[*trace.copies, TracedCopy("experts", slice_, "experts", (0, 0, 0))],
            parameters=trace.parameters | {"experts": tuple(self.tensors["experts"].shape)},
            dtypes=dict(trace.dtypes) | dict.fromkeys(quantised, FP8),
            scales={name: f"{name}_scale" for name in quantised},
        )
        for name, scale in self.trace.scales.items():
            shape = self.trace.parameters[name]
            self.tensors[name] = torch.zeros(shape, dtype=FP8, device=device)
            self.tensors[scale] = torch.zeros(*shape[:-1], 1, device=device)
        self.local: dict[str, Tensor] = {}

    def resharder(self, bucket_elements: int, live: Collection[str] | None = None) -> Resharder:
        """All weights live; or those that are named, and the others frozen."""
        shards = self.shards(live)
        route = Route.colocated(self.mesh)
        return SmallBuckets(shards, self.trace, self.tensors, route, bucket_elements)

    def shards(self, live: Collection[str] | None = None) -> list[NamedShard]:
        """This rank's shards."""
        found = []
        for c in self.layouts:
            frozen = live is not None and c.name not in live
            get = partial(self.local.__getitem__, c.name)
            found.append(NamedShard(c.name, c.shape, get, c.dim, frozen))
        return found

    def take_weights(self, seed: int, misaligned: bool = False) -> dict[str, Tensor]:
        """Cut new weights, into new memory; return them whole."""
        generator = torch.Generator().manual_seed(seed)
        whole = {c.name: torch.randn(c.shape, generator=generator) for c in self.layouts}
        device = next(iter(self.tensors.values())).device
        for layout in self.layouts:
            part = cut(whole[layout.name], layout.region(self.rank))
            memory = torch.empty(part.numel() + 1, device=device)[int(misaligned) :]
            self.local[layout.name] = memory[: part.numel()].view(part.shape).copy_(part)
        return whole

    def cut_in_place(self, whole: dict[str, Tensor]) -> None:
        """Give some shards other content where they lie."""
        for layout in self.layouts:
            if layout.name in whole:
                self.local[layout.name].copy_(cut(whole[layout.name], layout.region(self.rank)))

    def wrong(self, whole: dict[str, Tensor]) -> list[str]:
        """Parameters that are not, bit for bit, what the loader makes of the whole weights."""
        expected = self._loaded(whole)
        largest = {n: t.abs().amax(-1, keepdim=True).expand_as(t) for n, t in whole.items()}
        of_rows = self._loaded(largest)
        for name, scale in self.trace.scales.items():
            highest = torch.finfo(torch.float8_e4m3fn).max
            expected[scale] = of_rows[name][..., :1].float() / torch.tensor(highest)
            ratios = expected[name].float() / expected[scale]
            expected[name] = ratios.to(torch.float8_e4m3fn).view(FP8)
        return [n for n, t in self.tensors.items() if not torch.equal(t.cpu(), expected[n])]

    def _loaded(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters, none of them FP8, that the loader makes of whole weights."""
        oracle = FloatEngine(self.engine.rank, self.engine.tp)
        oracle.load_weights((name, whole[name]) for name in SOURCES)
        slice_ = self.trace.copies[-1].region
        return oracle.tensors() | {"experts": cut(whole["experts"], slice_).to(BFLOAT)}


class SmallBuckets(Resharder):
    """Counts elements instead of MiB, since toys have few of them."""

    def _agreed_plans(self, bucket_elements: int, frozen: list[str]) -> Any:
        return super()._agreed_plans(bucket_elements >> 19, frozen)


def cut(tensor: Tensor, region: Region) -> Tensor:
    for dim, (start, size) in enumerate(zip(region.offset, region.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def error_of(call: Any) -> str:
    try:
        call()
    except ReshardError as error:
        return str(error)
    return ""


@torch.no_grad()
def run_side(tp: int, replicas: int, by_columns: bool, device: str) -> dict[str, Any]:
    """What one rank sees of a mesh."""
    spec = fsdp_config(
        dist.get_world_size() // replicas, replicas, tensor_parallel_size=tp if by_columns else 1
    )
    side = Side(tp, build_mesh(spec, device), by_columns, device)
    resharder = side.resharder(bucket_elements=64)
    seen: dict[str, Any] = {"wrong": [], "buckets": len(buckets_of(resharder))}
    # New memory every time, at other offsets from 16 bytes the third time; then a second sync of
    # weights that were changed in place.
    for seed in range(3):
        whole = side.take_weights(seed, misaligned=seed == 2)
        seen["metrics"] = resharder.sync(seed, verify=True)
        seen["wrong"] += side.wrong(whole)
    for name, tensor in side.local.items():
        tensor.mul_(2)
        whole[name] *= 2
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        resharder.sync(3, verify=False)
    issued = ("c10d::send", "c10d::recv_", "c10d::_allgather_base_")
    seen["issued"] = sum(event.name in issued for event in profile.events())
    seen["planned"] = sum(bucket.operations for bucket in buckets_of(resharder))
    seen["wrong"] += side.wrong(whole)
    seen["late"] = beside_a_late_rank(resharder)
    seen["missed"] = missed_flips(side, resharder)
    seen["replicas"] = replica_error(side, resharder) if replicas > 1 else ""
    return seen


def beside_a_late_rank(resharder: Resharder) -> dict[str, float]:
    """Seconds of a sync to which rank 0 comes late, of a rank that exchanges with it; else none."""
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(LATE_S)
    metrics = resharder.sync(3, verify=False)
    waits = 0 in dist.get_process_group_ranks(resharder._group) and dist.get_rank() > 0
    return metrics if waits else {}


def missed_flips(side: Side, resharder: Resharder, kept: bool = False) -> list[str]:
    """Flip one bit of each copy and each message that a rank takes, on one rank after the other.

    Returns:
        What was not noticed, or blamed on anything else.
    """
    resharder.sync(4, verify=True, kept=kept)
    missed = []
    for rank in range(dist.get_world_size()):
        own = list(places(resharder)) if rank == dist.get_rank() else []
        count = torch.tensor(len(own))
        dist.broadcast(count, src=rank)
        for number in range(int(count)):
            blamed: list[Any] = [None]
            if own:
                name, tensor, offset = own[number]
                byte = side.tensors[tensor][offset].view(torch.uint8)[:1]
                byte ^= 1 << number % 8
                blamed = [f"\n  {name} on ranks [{rank}]: does not hold what was sent to it"]
            dist.broadcast_object_list(blamed, src=rank)
            message = error_of(lambda: resharder.verify(4))
            if own:
                byte ^= 1 << number % 8
            if not message.endswith(f"are not the actor's:{blamed[0]}"):
                missed.append(f"{blamed[0]}: {message}")
    resharder.verify(4)
    return missed


def places(resharder: Resharder) -> Any:
    """Parameter, tensor and last row of every local copy and every transfer to this rank.

    Also the last scale of each parameter that has scales.
    """
    plans = [executor.plan for executor in resharder._executors]
    taken = [copy for plan in plans for copy in plan.local]
    for bucket in (bucket for plan in plans for bucket in plan.buckets):
        taken += [transfer.copy for _, transfer in bucket.unpacked]
    for copy in taken:
        last = [o + n - 1 for o, n in zip(copy.offset, copy.region.shape, strict=True)]
        yield copy.parameter, copy.parameter, (*last[:-1], slice(last[-1], last[-1] + 1))
    for name, scale in resharder._trace.scales.items():
        yield name, scale, (-1,) * (len(resharder._trace.parameters[name]) - 1)


def buckets_of(resharder: Resharder) -> list[Any]:
    """The exchanges of its plans."""
    return [bucket for executor in resharder._executors for bucket in executor.plan.buckets]


@torch.no_grad()
def run_adapted(tp: int, replicas: int, device: str) -> dict[str, Any]:
    """What one rank sees where some weights are frozen and the others move at each sync."""
    spec = fsdp_config(dist.get_world_size() // replicas, replicas, tensor_parallel_size=tp)
    side = Side(tp, build_mesh(spec, device), by_columns=True, device=device, quantised=WHOLE)
    resharder = side.resharder(bucket_elements=64, live=LIVE)
    seen: dict[str, Any] = {"wrong": []}
    whole = side.take_weights(0)
    # The first sync is a full one, whatever is kept; a change of what is frozen would show.
    seen["first"] = resharder.sync(0, verify=True, kept=True)
    seen["wrong"] += side.wrong(whole)
    later = side.take_weights(1)
    side.take_weights(0)
    changed = whole | {name: later[name] for name in LIVE}
    side.cut_in_place({name: later[name] for name in LIVE})
    seen["second"] = resharder.sync(1, verify=True, kept=True)
    seen["wrong"] += side.wrong(changed)
    seen["missed"] = missed_flips(side, resharder, kept=True)
    side.tensors["embed"].fill_(torch.nan)
    seen["lost"] = error_of(lambda: resharder.sync(2, verify=True, kept=True))
    seen["again"] = resharder.sync(3, verify=True, kept=True)
    seen["wrong"] += side.wrong(changed)
    side.tensors["norm"].fill_(torch.nan)
    seen["not_kept"] = resharder.sync(4, verify=True, kept=False)
    seen["wrong"] += side.wrong(changed)
    resharder.sync(5, verify=False, kept=True)
    seen["unsure"] = resharder.sync(6, verify=True, kept=True)
    seen["wrong"] += side.wrong(changed)
    return seen


def replica_error(side: Side, resharder: Resharder) -> str:
    """What is said where the last replica has other weights, which arrive there as they are."""
    if dist.get_rank() == dist.get_world_size() - 1:
        side.local["gate"][-1, -1] += 1
    return error_of(lambda: resharder.sync(5, verify=True))


@torch.no_grad()
def run_split(folder: str, trainers: int, tp: int, replicas: int, adapted: bool) -> dict[str, Any]:
    """What one rank sees where the first ranks train and the others are engines."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", size)
    init_groups(store, rank, [range(trainers), range(trainers, size)], None)
    is_trainer, group = rank < trainers, everyone()
    shards = trainers // replicas if is_trainer else size - trainers
    copies = replicas if is_trainer else 1
    spec = fsdp_config(shards, copies, tensor_parallel_size=tp if is_trainer else 1)
    kinds = WHOLE if adapted else QUANTISED
    side = Side(tp, build_mesh(spec, "cpu"), by_columns=tp > 1, device="cpu", quantised=kinds)
    if is_trainer:
        own = sender(side.shards(LIVE if adapted else None), side.mesh, BFLOAT, group, tp)
    else:
        own = receiver(side.trace, side.tensors, group, tp)
    resharder = SmallBuckets(*own, 64)
    seen: dict[str, Any] = {"rank": dist.get_rank(group), "wrong": [], "bytes": []}
    for seed in range(2):
        whole = side.take_weights(0 if adapted else seed)
        metrics = resharder.sync(seed, verify=True, kept=True)
        seen["bytes"].append((metrics["received_bytes"], metrics["written_bytes"]))
        seen["wrong"] += [] if is_trainer else side.wrong(whole)
    flipped = side.tensors["gate_up"][-1, -1:].view(torch.uint8)
    flipped[0] ^= 1 if rank == size - 1 else 0
    seen["flipped"] = error_of(lambda: resharder.verify(2))
    flipped[0] ^= 1 if rank == size - 1 else 0
    if rank == trainers - 1:
        side.local["gate"][-1, -1] += 1
    seen["differs"] = error_of(lambda: resharder.sync(3, verify=True))
    return seen
