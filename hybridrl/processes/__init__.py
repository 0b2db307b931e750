"""Processes of user code: their start, limits, end and output. Nothing heavy is imported here.

    UserProcess (process.py) -> supervisor.py -> an entry, such as child.py -> user code

Whoever dies or misbehaves, a supervisor ends all that was started below it. pool.py computes items
in several processes (child.py), with the messages of messages.py. config/user_code/importing.py
tries out user code in one. cleanup.py ends the processes of a run that has no supervisor, Ray's.
texts.py makes errors of user code readable. kernel.py has Linux calls that Python lacks.
"""
