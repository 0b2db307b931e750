"""Environments: programs that answer the model between its turns, in processes of their own.

base.py defines `Environment`, which users implement, and the task of an environment process. It has
the trainer's side, too: a pool of such processes with a time limit per answer. calculator.py is an
example.
programs.py runs agent programs, commands.py those that are no coroutines.

The conversation loop lives in trainer/episodes, the process pool and its protocol in processes/.
Nothing here imports torch. Start reading at `base.Environment`.
"""
