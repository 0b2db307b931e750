"""openai-agents: an agent with a tool, by responses and by chat completions."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(max_retries=0)
    for model in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        agent = Agent(
            name="solver",
            instructions="Use add.",
            tools=[add],
            model=model(model="policy", openai_client=client),
            model_settings=ModelSettings(max_tokens=30),
        )
        first = await Runner.run(agent, "Tom has 3 pens and buys 4. How many?")
        history = [*first.to_input_list(), {"role": "user", "content": "And then?"}]
        stream = Runner.run_streamed(agent, history)
        async for _ in stream.stream_events():
            pass
        assert stream.final_output is not None


asyncio.run(main())
