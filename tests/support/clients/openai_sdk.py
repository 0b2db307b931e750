"""openai: chat in two turns, a stream, responses."""

from openai import OpenAI

client = OpenAI(max_retries=0)
question = {"role": "user", "content": "Tom has 3 pens and buys 4. How many?"}
options = {"model": "policy", "max_tokens": 30}
first = client.chat.completions.create(messages=[question], **options)
more = [question, first.choices[0].message, {"role": "user", "content": "And then?"}]
for chunk in client.chat.completions.create(messages=more, stream=True, **options):
    assert chunk.choices[0].index == 0
assert client.responses.create(model="policy", input="Hello", max_output_tokens=30).id
