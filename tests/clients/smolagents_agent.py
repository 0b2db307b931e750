"""smolagents: the chat model, in two turns, one of them streamed."""

import os

from smolagents import ChatMessage, MessageRole, OpenAIServerModel

url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIServerModel("policy", url, api_key=key)
text = "Tom has 3 pens and buys 4. How many?"
messages = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])]
messages.append(model.generate(messages, max_tokens=30))
more = [{"type": "text", "text": "And then?"}]
messages.append(ChatMessage(role=MessageRole.USER, content=more))
assert [*model.generate_stream(messages, max_tokens=30)]
