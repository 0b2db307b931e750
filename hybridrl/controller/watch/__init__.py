"""Detection of ranks and Ray processes that stall, die or are stopped, and cleaning up after them.

waiting.py waits for all ranks and finds the first failure or a stall. stall_report.py collects
evidence on the nodes and describes a stall, ray_monitor.py checks Ray's own processes, janitor.py
is a process that cleans up if the driver is killed.

Functions that run in worker processes: flight_recorder.py. Start reading at waiting.wait_for_all.
"""
