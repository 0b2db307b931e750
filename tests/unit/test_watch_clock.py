"""Time by which others are judged: what a watcher sleeps through counts little."""

import time

from hybridrl.controller.watch.process_snapshot import WatchClock


def test_time_passes_for_who_looks_often_enough():
    before = time.monotonic()
    clock = WatchClock(longest_gap_s=60.0)
    for _ in range(3):
        time.sleep(0.1)
        seconds = clock.now()
    assert 0.3 <= seconds <= time.monotonic() - before


def test_of_a_long_gap_no_more_than_the_longest_one_counts():
    clock = WatchClock(longest_gap_s=0.25)
    for looks in (1, 2):
        time.sleep(0.4)
        assert clock.now() == 0.25 * looks
