"""Trial of an agent's program before a run: on the first problem, up to its first prompt.

It runs as in training, in a process of its own, against the real endpoint. There is no model yet:
the first prompt that the endpoint accepts is not answered, and the program is ended there.
"""

import asyncio
import secrets
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import replace

from hybridrl.agents.episode import Episode, Settings
from hybridrl.agents.images import images_of
from hybridrl.agents.policy import Policy
from hybridrl.agents.record import EpisodeRecord
from hybridrl.agents.server import EndpointServer
from hybridrl.agents.text import ModelText
from hybridrl.agents.training.programs import ProgramPool, task_of
from hybridrl.config.checks.frozen_models import named_models
from hybridrl.config.schema import RunConfig
from hybridrl.data.requests import Progress, Request
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import load_tokenizer
from hybridrl.environments.programs import KEY, Job
from hybridrl.models.resolve import plain_folder
from hybridrl.models.vocabulary import stop_token_ids
from hybridrl.processes.messages import Failure
from hybridrl.processes.pool import ProcessesError
from hybridrl.processes.texts import last_frame
from hybridrl.rollout.vllm.text import Parsed

# Seconds after which a program that has asked nothing yet, such as one that builds its tools first,
# passes.
TRIAL_S = 60.0
# Needs no trial.
CALCULATOR = "hybridrl.environments.calculator_agent.run"


class Silent:
    """Engines that answer nothing; `asked` is done with the first request."""

    def __init__(self) -> None:
        self.asked: Future[None] = Future()

    def submit(self, request: Request) -> "asyncio.Queue[Progress]":
        """Note a request."""
        if not self.asked.done():
            self.asked.set_result(None)
        return asyncio.Queue()

    def cancel(self, request: Request) -> None:
        """Do nothing."""


def trial_problems(config: RunConfig, prompt: Prompt) -> list[str]:
    """Run the program on a problem up to its first prompt; return why it did not get so far."""
    agent = config.agent
    assert agent is not None
    if agent.function == CALCULATOR:
        return []
    engines, ends = Silent(), stop_token_ids(plain_folder(config.model.path))
    parse = None if agent.tool_parser is None else lambda text, tools: Parsed(text, [])
    tokenizer, images = load_tokenizer(config.model), images_of(config.model, named_models(config))
    text = ModelText(tokenizer, ends, config.data.chat_template_kwargs, images)
    policy = Policy(text, engines, parse)
    settings = Settings.of(config.rollout, agent.other_sampling)
    key, record = secrets.token_urlsafe(16), EpisodeRecord(policy.text.encode)
    policy.open(Episode(key, (config.seed, "trial"), 0, settings, record))
    try:  # at the run's address, since a program in a container may reach no other
        server = EndpointServer(policy, agent.host, agent.port)
    except (OSError, OverflowError, UnicodeError):  # which the run itself will report
        return []
    with closing(server), ProgramPool(replace(agent, num_processes=1)) as pool:
        (ended,) = pool.begin([Job(task_of(prompt), server.url, key)])
        wait((ended, engines.asked), TRIAL_S, FIRST_COMPLETED)
        if not ended.done() or engines.asked.done():
            return []
        reason = _reason(ended)
    if not reason:
        return []
    return [
        f"{KEY} = {agent.function}, but its trial on the first row of the data failed before its "
        f"first prompt: {reason}."
    ]


def _reason(ended: "Future[object]") -> str:
    """Return why a program failed, with its line; "" if it did not."""
    try:
        outcome = ended.result()
    except ProcessesError as error:
        return str(error)
    if not isinstance(outcome, Failure):
        return ""
    frame = last_frame(outcome.traceback)
    return f"{outcome.reason} ({frame})" if frame else outcome.reason
