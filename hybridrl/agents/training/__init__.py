"""Training of agents: programs that sample from the policy through the endpoint of agents/.

episodes.py: `ProgramEpisodes`, runs of a program as episodes; start reading there.
engines.py: the engines, which sample continuously.
batch.py: the batch of recorded episodes, with the rewards of their turns.
trial.py: the program's trial before a run.
"""
