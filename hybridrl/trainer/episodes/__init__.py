"""Episodes: how responses grow, from a prompt to their reward.

base.py: `Episodes`, the seam, and the generation of whole responses by it; start reading there.
responses.py: responses so far and groups of them, with their form in checkpoints.
turns.py: episodes of one or several turns of the policy, which calls of the engines sample.
conversations.py: several turns with an environment, its rewards and failures.
answers.py: answers of environments with images.
turn_rewards.py: rewards of single turns, and turns as members of their group.

Programs at the endpoint are episodes, too (agents/training).
"""
