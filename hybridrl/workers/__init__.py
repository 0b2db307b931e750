"""Workers: one class per role (actor, critic, ref, reward_model, teacher, rollout, sender, saver).

Every process has one instance of each role; with rollout.schedule=split of those of its kind of
rank. Workers do not know Ray; sharding, forward passes and storage live in distributed/, sampling
in rollout/.

- base.py: common methods, and marks of those that the controller calls
- model_worker.py: roles with a sharded model; training.py: optimizer steps of actor and critic
- shadow.py: the second copy of an engine's weights

Start reading at actor.py.
"""
