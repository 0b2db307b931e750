"""The plan of a rank for all weights together, of which none are frozen."""

from collections.abc import Sequence

from hybridrl.distributed.regions import Trace
from hybridrl.reshard.plan import Plan, build_plans
from hybridrl.reshard.transfers import SourceLayout


def build_plan(
    sources: Sequence[SourceLayout], traces: Sequence[Trace], rank: int, bucket_elements: int
) -> Plan:
    """As `build_plans`, which makes one plan then."""
    (plan,) = build_plans(sources, [], traces, rank, bucket_elements)
    return plan
