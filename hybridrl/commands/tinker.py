"""`hybridrl tinker`: a server with which the SDK of Tinker trains and samples a model."""

import argparse
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hybridrl.app.before_start import compose_line, examine
from hybridrl.commands.evaluation.subject import safe_name
from hybridrl.commands.running import (
    CONFIG_DIR,
    OVERRIDES,
    UsageError,
    argument,
    parsed,
    run_command,
)
from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.command.overrides import quoted
from hybridrl.config.errors import raised_problems
from hybridrl.config.schema import ModelConfig
from hybridrl.controller.calls import SetupTimes
from hybridrl.main import prepare
from hybridrl.models.resolve import name_or_folder
from hybridrl.tinker import SUPPORTED, is_supported

DESCRIPTION = """\
Serve a model to tinker's SDK, unmodified, for training loops of your own: the primitives
forward_backward, optim_step, sample and save_state on your machines.

  hybridrl tinker Qwen/Qwen3-0.6B                     prints TINKER_BASE_URL and TINKER_API_KEY
  hybridrl tinker /models/q --name Qwen/Qwen3-8B-Base --port 8000 lora.rank=16

Overrides as in `hybridrl train`: groups (hardware=) and key=value.
"""
# As the SDK asks for them.
ADAPTERS = ("lora=default", "lora.rank=32")
EXTRA = "pip install 'hybridrl[tinker]'"
# Seconds in which clients can ask why the service has ended.
LAST_ANSWERS_S = 10.0


def main() -> None:
    """Run the command; exits by SystemExit unless all goes well."""
    args = parsed(
        "tinker",
        DESCRIPTION,
        argument("model", metavar="MODEL", help="model folder, hub name, or embedded"),
        OVERRIDES,
        CONFIG_DIR,
        argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)"),
        argument("--port", type=int, default=0, help="port to listen on (a free one)"),
        argument("--key", help="key that clients send, beginning with tml- (a random one)"),
        argument("--name", action="append", default=[], help="one more name of the model"),
        argument("--folder", metavar="DIR", help="of saved states (outputs/tinker-<model>)"),
    )
    run_command(lambda: _serve(args))


def _problems(args: argparse.Namespace) -> Iterator[str]:
    try:
        if not is_supported(installed := version("tinker")):
            yield f"tinker = {installed}: expected {SUPPORTED}.\nType: {EXTRA}"
    except PackageNotFoundError:
        yield f"tinker, whose messages the server reads, is not installed.\nType: {EXTRA}"
    if args.key is not None and not re.fullmatch(r"tml-[\w-]+", args.key, re.ASCII):
        yield "--key: expected tml- and letters, digits, - and _; the SDK sends no others."


def _serve(args: argparse.Namespace) -> None:
    if problems := [*_problems(args)]:
        raise UsageError(*problems)
    folder = Path(args.folder or f"outputs/tinker-{safe_name(Path(args.model).name)}").resolve()
    own = [f"model.path={quoted(args.model)}", f"hydra.run.dir={quoted(str(folder))}"]
    if not any(text.startswith("lora=") for text in args.line):
        own += ADAPTERS
    composition = compose_line(parse_argv([*own, *args.line]))
    prepared = prepare(examine(composition), SetupTimes(time.time()), folder)
    if prepared is None:  # run.dry has shown the plan
        return
    config = prepared.checked.result.config
    if config.lora is None:
        raise UsageError("lora = none: the SDK asks for adapters.\nRemove it.")
    # Heavy imports follow the checks.
    from hybridrl.agents.http import HttpServer
    from hybridrl.agents.training.endpoint import check_address
    from hybridrl.app.primitives import service_parts
    from hybridrl.service.service import Primitives
    from hybridrl.tinker.clients import Served
    from hybridrl.tinker.protocol import Answers
    from hybridrl.tinker.server import app_of

    if wrong := raised_problems(check_address, args.host, args.port, "--host {} --port {}"):
        raise UsageError(*wrong)
    names, key = _names(args, config.model), args.key or f"tml-{secrets.token_urlsafe(16)}"
    with service_parts(prepared, folder) as parts, Primitives(*parts) as service:
        answers = Answers(service, Served(names, names[0], config.lora))
        with closing(HttpServer(app_of(answers, key), args.host, args.port)) as server:
            sys.stdout.write(f"export TINKER_BASE_URL={server.url} TINKER_API_KEY={key}\n")
            sys.stdout.flush()
            error = answers.failed.result()  # until a signal
            time.sleep(LAST_ANSWERS_S)
            raise error


def _names(args: argparse.Namespace, model: ModelConfig) -> list[str]:
    """Return the names of the model: that on the hub or its folder, as typed, and further ones."""
    name = name_or_folder(model)
    if name.count("/") == 2 and name.startswith("/"):
        name += "/"  # of <a>/<b>/<c> the SDK takes the tokenizer of <a>/<b>
    return list(dict.fromkeys([name, args.model, *args.name]))
