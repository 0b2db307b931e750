"""The plan of a run: memory, FLOPs and the machine they are compared with."""
