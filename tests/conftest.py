"""What holds for all tests."""

import signal

# Programs that a shell runs in the background inherit a Ctrl-C that is ignored. The tests of
# interruption need the usual one, in this process and in those it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
