"""The roles: actor, critic, reference and rollout, one instance of each per process."""
