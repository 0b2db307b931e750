"""Detection of ranks and Ray processes that stall, die or are stopped, and cleaning up after them.

waiting.py waits for all ranks and finds the first failure; meanwhile it calls stall_detector.py
every second. A stall becomes an error by stall_error.py (collects the evidence on the nodes) and
stall_report.py (finds the suspects, writes the text). ray_monitor.py checks Ray's own processes;
janitor.py is a process that cleans up if the driver is killed.

Functions that run in worker processes: flight_recorder.py. Start reading at waiting.wait_for_all.
"""
