"""Environments of others as agent programs: adapters of verifiers, OpenEnv and Gymnasium.

    async def run(task, client, **args) -> reward     one episode, as programs.py runs it
    def rows(split, **args) -> rows                   the environment's tasks (data.function)

Their packages are extras, imported in the processes of programs and data only. base.py has what the
adapters share. Start reading at verifiers.py.
"""
