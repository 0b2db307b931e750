"""Training of agents: programs that sample from the policy through the endpoint of agents/.

generator.py: `AgentGenerator`, the Generator that runs a program per episode; start reading there.
engines.py: the engines, which sample continuously. batch.py: the batch of recorded episodes.
turn_rewards.py: rewards of turns, and the reward-to-go that estimators compare.
sampling.py: episodes that take several steps (rollout.schedule=partial).
"""
