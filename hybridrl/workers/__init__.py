"""The roles actor, critic, ref, reward_model and rollout: one instance of each per process."""
