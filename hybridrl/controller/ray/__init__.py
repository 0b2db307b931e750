"""Ray itself: its start and end, the nodes of a cluster, functions run on them.

Worker processes and roles live one folder above, the detection of lost Ray processes in watch/.
Start reading at runtime.py; compat.py has everything that depends on private names of Ray.

ray_probes, cluster_view    nodes as known to Ray, with their hardware, and to its head
node_probes, ray_probes     functions on nodes, for the doctor
"""
