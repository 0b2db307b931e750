"""Driver's side of the workers: placement, rendezvous, worker groups, signals and shutdown.

The only folder that imports ray. Start reading at `worker_group.open_pool`, then pool.py
(processes as seen by the driver) and host.py (one process).
"""
