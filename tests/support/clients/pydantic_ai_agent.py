"""pydantic-ai: an agent with a tool, in two turns."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.settings import ModelSettings

agent = Agent(
    OpenAIChatModel("policy"),
    instructions="Use add.",
    model_settings=ModelSettings(max_tokens=30),
)


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


first = agent.run_sync("Tom has 3 pens and buys 4. How many?")
second = agent.run_sync("And then?", message_history=first.all_messages())
assert isinstance(second.output, str)
