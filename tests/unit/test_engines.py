"""Metrics of the rollout engines, and the alarm for one that falls behind."""

from hybridrl.data.batch import EngineStats
from hybridrl.trainer.engines import QUIET, WINDOW, StragglerAlarm, engine_metrics


def engines(*tokens_per_second: float) -> list[EngineStats]:
    """Engines that sampled for ten seconds each."""
    return [EngineStats(int(10 * speed), 10.0, 0.5) for speed in tokens_per_second]


def alarm() -> StragglerAlarm:
    return StragglerAlarm(lambda engine: f"rank {engine} on node-a")


def after(steps: int, watch: StragglerAlarm, *tokens_per_second: float) -> list[str]:
    """All that is said in these steps."""
    return [text for _ in range(steps) for text in watch.warnings(engines(*tokens_per_second))]


def test_metrics_hand_worked():
    stats = [EngineStats(300, 2.0, 0.1), EngineStats(100, 2.0, 0.4), EngineStats(0, 0.0, 0.0)]
    assert engine_metrics(stats, seconds=4.0) == {
        "rollout/tokens_per_second": 100.0,
        "rollout/engine_tokens_per_second_min": 50.0,
        "rollout/engine_tokens_per_second_mean": 100.0,
        "rollout/engine_tokens_per_second_max": 150.0,
        "rollout/slowest_engine": 1.0,
        "rollout/first_token_s": 0.4,
        "rollout/engine_tokens_per_second_0": 150.0,
        "rollout/engine_tokens_per_second_1": 50.0,
    }
    assert engine_metrics([EngineStats(0, 0.0, 0.0)], seconds=1.0) == {}


def test_a_slow_engine_is_named_with_its_place_its_speed_and_the_median_of_the_others():
    (text,) = after(WINDOW, alarm(), 1000, 2600, 2400, 1250)
    assert "engine 0 (rank 0 on node-a) sampled 1,000 tokens/s" in text
    assert "the other engines 2,400 in the median" in text
    assert "below 0.5 of that" in text


def test_at_half_the_speed_nothing_is_said():
    assert after(10 * WINDOW, alarm(), 1000, 2000) == []


def test_a_step_at_full_speed_begins_the_count_anew():
    watch = alarm()
    assert after(WINDOW - 1, watch, 500, 2000) == []
    assert after(1, watch, 1500, 2000) == []
    assert after(WINDOW - 1, watch, 500, 2000) == []
    assert len(after(1, watch, 500, 2000)) == 1


def test_a_warning_is_repeated_only_after_a_while():
    watch = alarm()
    assert len(after(WINDOW, watch, 500, 2000)) == 1
    assert after(QUIET - 1, watch, 500, 2000) == []
    assert len(after(1, watch, 500, 2000)) == 1


def test_an_engine_without_prompts_is_no_straggler():
    assert after(10, alarm(), 0, 2000) == []
