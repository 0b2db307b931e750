"""Workers: one class per role (actor, critic, ref, reward_model, rollout, sender, saver, replay).

Every process has one instance of each role; with rollout.schedule=split of those of its kind of
rank. base.py has their common methods and marks those that the controller calls, model_worker.py
has roles with a sharded model, training.py the optimizer steps of actor and critic, shadow.py the
second copy of an engine's weights. Workers do not know Ray; sharding, forward passes and storage
live in distributed/, sampling in rollout/.

Start reading at actor.py.
"""
