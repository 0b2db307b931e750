"""How long collectives wait: for as long as the run does.

The driver ends a call in which no rank gets further (cluster.stall_timeout_s). A limit of torch's,
30 minutes and 10 with NCCL, would also end ranks that rightly wait for one that is at work.
"""

from datetime import timedelta

from hybridrl.distributed.torch_compat import set_timeouts

# Longer than anybody waits in a call; 24 days of milliseconds are the most that 31 bits hold.
NO_LIMIT = timedelta(days=24)


def lift_limits() -> None:
    """Let the collectives of all process groups of this process, vLLM's too, wait without limit."""
    set_timeouts(NO_LIMIT)
