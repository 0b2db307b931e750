"""smolagents: its agent that writes Python, which gives up after two steps without any."""

import os

from smolagents import CodeAgent, OpenAIServerModel

model = OpenAIServerModel(
    "policy", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], max_tokens=30
)
# Its own templates are longer than the embedded model's context.
plan = {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""}
templates = {
    "system_prompt": "Write Python.",
    "planning": plan,
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "Answer now.", "post_messages": "{{ task }}"},
}
agent = CodeAgent([], model, prompt_templates=templates, max_steps=2)
run = agent.run("Tom has 3 pens and buys 4. How many?", return_full_result=True)
assert run.state == "max_steps_error"
