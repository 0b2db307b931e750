"""`hybridrl serve`: the endpoint of agents over the weights of a checkpoint or a model."""

import re
import secrets
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hybridrl.app.compose import find_machine
from hybridrl.commands.evaluation.config import OF_SAMPLING, evaluation_config
from hybridrl.commands.evaluation.options import find_subject
from hybridrl.commands.running import (
    UsageError,
    argument_parser,
    run_command,
    warn_about_changed_model,
)
from hybridrl.config.checks.installation import check_installation
from hybridrl.config.choices import OtherSampling
from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.errors import raised_problems
from hybridrl.models.resolve import absolute_path, model_folder

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
    run_command(lambda: _serve(sys.argv[1:]))


def _serve(argv: Sequence[str]) -> None:
    parser = argument_parser("serve", DESCRIPTION)
    add = parser.add_argument
    add("subject", metavar="PATH", help="checkpoint, run directory, model folder or hub name")
    add("overrides", nargs="*", default=[], metavar="key=value", help="of the config")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=0, help="port to listen on (a free one)")
    add("--key", help="key that clients send (a random one)")
    add("--tool-parser", metavar="NAME", help="vLLM's parser of tool calls (the run's)")
    choices = [one.value for one in OtherSampling]
    add("--other-sampling", choices=choices, help="as agent.other_sampling (the run's)")
    add("--run-code", action="store_true", help="trust the checkpoint's config, as hybridrl eval")
    args = parser.parse_intermixed_args(list(argv))
    key = args.key or secrets.token_urlsafe(16)
    if not re.fullmatch(r"[\w-]+", key, re.ASCII):
        raise UsageError("--key has other characters than letters, digits, - and _.\nRemove them.")
    subject, machine = find_subject(args.subject), find_machine()
    line = parse_argv(args.overrides)
    config = evaluation_config(
        line, subject, machine, runs_code=args.run_code, sections=OF_SAMPLING
    ).config
    check_installation(config.hardware.accelerator)
    # Heavy imports follow the checks.
    from hybridrl.commands.evaluation.session import rollout_engines
    from hybridrl.controller.ray.runtime import ray_runtime
    from hybridrl.trainer.agents.endpoint import Endpoint
    from hybridrl.trainer.factory import check_address

    if wrong := raised_problems(check_address, args.host, args.port, "--host {} --port {}"):
        raise UsageError(*wrong)
    model_folder(config.model)  # downloads once, not in every worker
    if subject.checkpoint is not None:
        warn_about_changed_model(subject.checkpoint, config.model)
    found = None if subject.checkpoint is None else subject.checkpoint.manifest.config.get("agent")
    agent = found or {"tool_parser": None, "other_sampling": OtherSampling.refuse}
    with ray_runtime(config.cluster, config.hardware.accelerator), ExitStack() as stack:
        config.model.path = absolute_path(config.model.path)
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridrl-serve-")))
        rollout = rollout_engines(config, subject.folder, subject.step, logs, stack)
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
