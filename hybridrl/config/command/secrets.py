"""Secrets of a run's config and environment, and their removal from texts and files.

A key or variable is secret by its name (`api_key`, `HF_TOKEN`); a login in a URI is always secret.
Their values are replaced by *** in all output.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.processes.process import is_secret_variable

# Replacement of a secret.
HIDDEN = "***"
# Shorter values would match by chance.
MIN_LENGTH = 8

# Tokens of text.
_TEXT_TOKEN = re.compile(r"(^|[._-])(stop|start|end|eos|bos|pad|unk|mask|sep|cls)[_-]?token$", re.I)
_NAME = re.compile(
    r"(^|[._-])(token|password|passwd|pwd|passphrase|secret|credentials?|api[_-]?key"
    r"|(access|private|secret|auth|account|anthropic|encryption|hmac|license|master|openai|service"
    r"|shared|signing|storage|subscription|wandb)[_-]?key|connection[_-]?string)$",
    re.I,
)
# user:password@ or token@ in a URI.
_LOGIN = re.compile(r"(?<=://)[^/@\s'\"]+@")
# An entry of a mapping in one override: +mine={api_key: x}.
_ENTRY = re.compile(r"([\w.\-]+)(\s*:\s*)('[^']*'|\"[^\"]*\"|[^,{}\[\]\s]+)")
_ASSIGNMENT = re.compile(r"^([+~]*)([\w.\-/@]+)=(.*)$", re.S)


def is_secret_key(name: str) -> bool:
    """Return whether a config key holds a secret, by (the end of) its name."""
    return _NAME.search(name) is not None and _TEXT_TOKEN.search(name) is None


def secrets_of(environment: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """Return secrets of variables and of a command line, longest first."""
    secrets = {value for name, value in environment.items() if is_secret_variable(name)}
    for argument in arguments:
        assigned = _ASSIGNMENT.match(argument)
        if assigned and is_secret_key(assigned[2]):
            secrets |= {text.strip("'\"") for text in (assigned[3], *assigned[3].split(","))}
        entries = _ENTRY.findall(argument)
        secrets |= {value.strip("'\"") for key, _, value in entries if is_secret_key(key)}
    return _longest_first(text for text in secrets if len(text) >= MIN_LENGTH)


def without(secrets: Iterable[str], text: str) -> str:
    """Return a text without secrets and logins of URIs."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _LOGIN.sub(f"{HIDDEN}@", text)


def known_secrets(more: Iterable[str] = ()) -> list[str]:
    """Return the secrets of this process's environment and command line, and `more`, in all forms.

    Longest first; without short ones, as in `secrets_of`.
    """
    secrets = {*more, *secrets_of(os.environ, sys.argv)}
    return _longest_first(form for form in _forms(secrets) if len(form) >= MIN_LENGTH)


def _forms(secrets: Iterable[str]) -> Iterator[str]:
    """Yield secrets in plain, JSON and YAML form, and their long lines."""
    for secret in secrets:
        yield from (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
        yield secret.replace("'", "''")
        lines = (line.strip() for line in secret.splitlines())
        yield from (line for line in lines if len(line) >= MIN_LENGTH)


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted({*texts}, key=len, reverse=True)


def without_secrets(text: str, more: Iterable[str] = ()) -> str:
    """Return a text without the secrets of this process, and `more`."""
    return without(known_secrets(more), text)


def argument_without_secret(argument: str) -> str:
    """Return a command-line argument without secrets."""
    assigned = _ASSIGNMENT.match(argument)
    if assigned and is_secret_key(assigned[2]):
        return f"{assigned[1]}{assigned[2]}={HIDDEN}"
    return without_secrets(_ENTRY.sub(_entry_without_secret, argument))


def _entry_without_secret(entry: re.Match[str]) -> str:
    return f"{entry[1]}{entry[2]}{HIDDEN}" if is_secret_key(entry[1]) else entry[0]


def config_secrets(cfg: DictConfig) -> set[str]:
    """Return the values of a config's secret keys, unresolved and resolved."""
    secrets = {*secret_values(OmegaConf.to_container(cfg))}
    try:
        return secrets | {*secret_values(OmegaConf.to_container(cfg, resolve=True))}
    except OmegaConfBaseException:  # a problem of the config, reported elsewhere
        return secrets


def secret_values(tree: Any, *, is_secret: bool = False) -> Iterator[str]:
    """Yield the values of secret keys of plain data; of numbers, lists and sections long ones."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if is_secret_key(str(name)) and isinstance(value, str):
                yield value
            else:
                yield from secret_values(value, is_secret=is_secret or is_secret_key(str(name)))
    elif isinstance(tree, list):
        for value in tree:
            yield from secret_values(value, is_secret=is_secret)
    elif is_secret and len(str(tree)) >= MIN_LENGTH:
        yield str(tree)


def hide_in_files(paths: Iterable[Path], of_config: Iterable[str]) -> None:
    """Hide the secrets of a config, the environment and the command line in files."""
    # Short secrets of the config, too: these files contain it.
    secrets = _longest_first([*_forms(filter(None, of_config)), *known_secrets()])
    for path in paths:
        text = path.read_text(encoding="utf-8")
        hidden = without(secrets, text)
        if hidden != text:
            path.write_text(hidden, encoding="utf-8")
