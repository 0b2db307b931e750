"""anthropic: messages in two turns, the second one streamed."""

from anthropic import Anthropic

client = Anthropic(max_retries=0)
messages = [{"role": "user", "content": "Tom has 3 pens and buys 4. How many?"}]
options = {"model": "policy", "max_tokens": 30}
first = client.messages.create(messages=messages, **options)
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "So?"}]
with client.messages.stream(messages=messages, **options) as stream:
    assert stream.get_final_message().usage.output_tokens
