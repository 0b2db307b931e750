"""litellm: OpenAI's and Anthropic's formats, streamed and not."""

import os

import litellm

question = {"role": "user", "content": "Tom has 3 pens and buys 4. How many?"}
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
options = {"api_key": key, "max_tokens": 30, "num_retries": 0}
first = litellm.completion("openai/policy", [question], api_base=base, **options)
text = first.choices[0].message.content
more = [question, {"role": "assistant", "content": text}, {"role": "user", "content": "So?"}]
assert [*litellm.completion("openai/policy", more, api_base=base, stream=True, **options)]
anthropic = os.environ["ANTHROPIC_BASE_URL"]
assert litellm.completion("anthropic/policy", [question], api_base=anthropic, **options).id
