"""OpenAI- and Anthropic-compatible endpoint through which programs sample from the policy.

record.py records the tokens of an episode, which are those that are trained; start reading there.
policy.py samples a completion. server.py serves HTTP; chat.py, text_completions.py and the like are
the formats of the requests. constraints.py has JSON schemas and forced tool calls.
"""
