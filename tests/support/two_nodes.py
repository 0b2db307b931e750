"""Starts two Ray nodes on this machine and prints their address; ends them when stdin closes."""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    """Keep a cluster of two nodes with two CPU slots each until stdin is closed."""
    size = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=size)
    cluster.add_node(**size)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
