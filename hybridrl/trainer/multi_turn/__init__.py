"""Multi-turn responses: the policy and an environment take turns.

generator.py: `MultiTurn`, the Generator whose responses are conversations; start reading there.
conversations.py: the environment's part of them, which partial rollouts use, too.
environment.py: the rewards and failures of environments, and the encoder of their replies.
"""
