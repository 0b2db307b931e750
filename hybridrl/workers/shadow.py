"""Shadow copy of an engine's weights, which arrive from other ranks while the engine samples.

this thread      decoding steps ............... swap: shadow copy -> live parameters
another thread   wait for the senders, receive, verify fingerprints --^
"""

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridrl.config.schema import RolloutConfig
from hybridrl.distributed.mesh import everyone
from hybridrl.distributed.part_timer import PartTimer
from hybridrl.distributed.regions import Trace
from hybridrl.reshard.resharder import Resharder
from hybridrl.reshard.route import receiver

# Seconds for which the sampling thread may keep Python's interpreter while weights arrive. With
# Python's 5 ms, each bucket would wait for it.
SWITCH_INTERVAL_S = 1e-4


class ShadowCopy:
    """Second copy of the tensors that an engine's loader writes, on this rank.

    Construction and every sync are collectives of all ranks that train or sample.

    Args:
        trace: trace of the engine's loader on this rank.
        live: the engine's tensors by name; they never move.
        config: sizes of engines and buckets, and whether syncs are verified.
    """

    def __init__(self, trace: Trace, live: Mapping[str, Tensor], config: RolloutConfig) -> None:
        self._live = [live[name] for name in trace.tensors]
        shadow = {name: torch.empty_like(live[name]) for name in trace.tensors}
        self._shadow = list(shadow.values())
        side = receiver(trace, shadow, everyone(), config.tensor_parallel_size)
        self._resharder = Resharder(*side, config.reshard_bucket_mb)
        self._verify = config.verify_reshard
        self._device = self._live[0].device
        self._stream = torch.cuda.Stream() if self._device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1)
        self._arriving: tuple[int, Future[dict[str, float]]] | None = None

    def begin(self, version: int) -> None:
        """Begin to receive weights in another thread; return at once."""
        assert self._arriving is None, "weights arrive already"
        self._arriving = version, self._thread.submit(self._receive, version)

    @torch.no_grad()
    def swap(self, version: int) -> dict[str, float]:
        """Wait until weights `version` are there and verified, then copy them into the engine.

        Returns:
            Seconds: `wait_s`, `pause_s` (the copy, device work included) and `sync.<part>`.
        """
        if self._arriving is None:
            self.begin(version)
        assert self._arriving is not None
        arriving, future = self._arriving
        assert arriving == version, f"weights {arriving} arrive, expected {version}"
        timer = PartTimer(self._device)
        with timer.part("wait_s"):
            metrics = future.result()
        self._arriving = None
        with timer.part("pause_s"):
            torch._foreach_copy_(self._live, self._shadow)
        return timer.seconds | {f"sync.{name}": value for name, value in metrics.items()}

    def _receive(self, version: int) -> dict[str, float]:
        """Receive and verify; return the metrics of the sync."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            wait_for_peers(everyone())
            with _quick_switches():
                return self._resharder.sync(version, verify=self._verify, kept=True)


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Shorten the time for which another thread may keep Python's interpreter."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def wait_for_peers(group: ProcessGroup) -> None:
    """Wait on the host for all ranks of a group; a kernel of NCCL would occupy the GPU."""
    dist.all_reduce(torch.zeros(1), group=group)
