"""Resource planner: predicted memory, FLOPs and the machine that they are compared with."""
