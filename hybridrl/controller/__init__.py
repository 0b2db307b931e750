"""Driver's side of the workers: placement, rendezvous, worker groups, signals and shutdown.

The only folder that imports ray. Roles (workers/) and the training loop (trainer/) do not live
here. Subfolders: ray/ (runtime, nodes, compatibility), watch/ (stalls, deaths, cleaning up).

Start reading at `worker_group.start_workers`, then pool.py (processes as seen by the driver) and
host.py (one process).
"""
