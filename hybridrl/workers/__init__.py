"""Workers: one class per role (actor, critic, ref, reward_model, rollout, sender, saver, replay).

Every process has one instance of each role, or of those of its kind of rank (schedule split). base.py has their common methods and marks those that
the controller calls, model_worker.py has roles with a sharded model, training.py the optimizer
steps of actor and critic. Workers do not know Ray; sharding, forward passes and storage live in
distributed/, sampling in rollout/.

Start reading at actor.py.
"""
