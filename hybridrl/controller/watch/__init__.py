"""Detection of ranks and Ray processes that stall, die or are stopped, and cleaning up after them.

Start reading at waiting.wait_for_all. flight_recorder.py runs in worker processes.
"""
