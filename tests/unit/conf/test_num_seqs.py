"""rollout.max_num_seqs where it is left open: what one engine is dealt in a step, bounded."""

import pytest

from tests.support.composing import examined


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 256),  # conf/hardware/cpu.yaml
        (["rollout.max_num_seqs=null"], 512),  # 64 prompts x 8, one engine
        (["rollout.max_num_seqs=null", "cluster.gpus_per_node=3"], 22 * 8),  # ceil(64 / 3)
        (
            [
                "rollout.max_num_seqs=null",
                "cluster.gpus_per_node=2",
                "rollout.tensor_parallel_size=2",
            ],
            512,
        ),
        (["rollout.max_num_seqs=null", "data.prompts_per_step=256"], 1024),
    ],
)
def test_one_engine_decodes_what_it_is_dealt(overrides, expected):
    found = examined(["+recipe=gsm8k_ppo", "hardware=cpu", *overrides])
    assert found.config.rollout.max_num_seqs == expected
