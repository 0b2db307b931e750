"""`hybridrl serve`: the endpoint of agents over the weights of a checkpoint or a model."""

import argparse
import re
import secrets
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hybridrl.commands.evaluation.subject import OF_SAMPLING, find_subject, prepared
from hybridrl.commands.running import (
    OVERRIDES,
    RUN_CODE,
    SUBJECT,
    UsageError,
    argument,
    parsed,
    run_command,
)
from hybridrl.config.choices import OtherSampling
from hybridrl.config.errors import raised_problems
from hybridrl.models.resolve import absolute_path

DESCRIPTION = """\
Serve a checkpoint or any Hugging Face model at the endpoint that environment=agent trains with:
/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models.

  hybridrl serve outputs/x                                newest good checkpoint of a run
  hybridrl serve Qwen/Qwen2.5-0.5B-Instruct --tool-parser hermes --port 8000

Temperature, top_p and lengths are those of the run; requests for others get the same error as in
training. Overrides as in `hybridrl train`: groups (hardware=) and key=value.
"""

# Conversations whose tokens are continued as they were sampled.
SEQUENCES = 64


def main() -> None:
    """Run the command; exits by SystemExit unless all goes well."""
    choices = [one.value for one in OtherSampling]
    args = parsed(
        "serve",
        DESCRIPTION,
        SUBJECT,
        OVERRIDES,
        argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)"),
        argument("--port", type=int, default=0, help="port to listen on (a free one)"),
        argument("--key", help="key that clients send (a random one)"),
        argument("--tool-parser", metavar="NAME", help="vLLM's parser of tool calls (the run's)"),
        argument("--other-sampling", choices=choices, help="agent.other_sampling (the run's)"),
        RUN_CODE,
    )
    run_command(lambda: _serve(args))


def _serve(args: argparse.Namespace) -> None:
    key = args.key or secrets.token_urlsafe(16)
    if not re.fullmatch(r"[\w-]+", key, re.ASCII):
        raise UsageError("--key has other characters than letters, digits, - and _.\nRemove them.")
    subject = find_subject(args.subject)
    config = prepared(subject, args.line, runs_code=args.run_code, sections=OF_SAMPLING).config
    # Heavy imports follow the checks.
    from hybridrl.agents.training.endpoint import Endpoint, check_address
    from hybridrl.commands.evaluation.session import rollout_engines
    from hybridrl.controller.ray.runtime import ray_runtime

    if wrong := raised_problems(check_address, args.host, args.port, "--host {} --port {}"):
        raise UsageError(*wrong)
    run = {} if subject.checkpoint is None else subject.checkpoint.manifest.config
    agent = run.get("agent") or {"tool_parser": None, "other_sampling": OtherSampling.refuse}
    with ray_runtime(config.cluster, config.hardware.accelerator), ExitStack() as stack:
        config.model.path = absolute_path(config.model.path)
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridrl-serve-")))
        rollout = rollout_engines(config, subject, logs, stack)
        endpoint = stack.enter_context(
            Endpoint(
                config.rollout,
                rollout,
                args.host,
                args.port,
                tool_parser=args.tool_parser or agent["tool_parser"],
                other_sampling=OtherSampling(args.other_sampling or agent["other_sampling"]),
                template_options=config.data.chat_template_kwargs,
            )
        )
        endpoint.episode(key, (config.rollout.seed, "serve"), 0, endpoint.settings, SEQUENCES)
        url = endpoint.server.url
        sys.stdout.write(f"export OPENAI_BASE_URL={url} OPENAI_API_KEY={key}\n")
        sys.stdout.write(f"export ANTHROPIC_BASE_URL={url[:-3]} ANTHROPIC_API_KEY={key}\n")
        sys.stdout.flush()
        endpoint.engines.run(lambda: False, endpoint.server.loop)  # until a signal
