"""mini-swe-agent: its agent in a local shell, which gives up: the model writes no command."""

import os

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

options = {"api_base": os.environ["OPENAI_BASE_URL"], "max_tokens": 30}
model = LitellmModel(
    model_name="openai/policy", model_kwargs=options, cost_tracking="ignore_errors"
)
templates = {"system_template": "Use the shell.", "instance_template": "{{ task }}"}
agent = DefaultAgent(model, LocalEnvironment(), step_limit=4, **templates)
assert agent.run("How many files are here?")["exit_status"] in ("RepeatedFormatError", "Submitted")
assert agent.n_calls == 3
