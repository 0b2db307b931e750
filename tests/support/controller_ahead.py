"""A module that a role needs, which notes the thread that imports it."""

import threading

THREAD = threading.current_thread().name
