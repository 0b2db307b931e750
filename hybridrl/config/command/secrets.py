"""What is secret of a run's config and environment, and texts without it.

A key or variable is secret by its name (`api_key`, `HF_TOKEN`), a login in a URI always. What they
hold is hidden wherever it would be written, by whatever way it got there.
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

# Stands in place of a secret.
HIDDEN = "***"
# Shorter values would be found by chance.
MIN_LENGTH = 8

_NAME = re.compile(
    r"(^|[._-])(token|password|passwd|pwd|passphrase|secret|credentials?|api[_-]?key"
    r"|(access|private|secret|auth|account|anthropic|encryption|hmac|license|master|openai|service"
    r"|shared|signing|storage|subscription|wandb)[_-]?key|connection[_-]?string)$",
    re.I,
)
# The short words are secret behind another word only: PWD is a folder, COMPASS no PASS.
_VARIABLE = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|KEY|CONNECTION_?STRING|PGPASS)$|SECRET"
    r"|_(PASS|PWD|PAT|AUTH|CREDS)$",
    re.I,
)
# user:password@ or token@ in a URI.
_LOGIN = re.compile(r"(?<=://)[^/@\s'\"]+@")
# An entry of a mapping that is given as one value: +mine={api_key: x}.
_ENTRY = re.compile(r"([\w.\-]+)(\s*:\s*)('[^']*'|\"[^\"]*\"|[^,{}\[\]\s]+)")
_ASSIGNMENT = re.compile(r"^([+~]*)([\w.\-/@]+)=(.*)$", re.S)


def is_secret_key(name: str) -> bool:
    """Whether a config key holds a secret, by its name or the last part of it."""
    return _NAME.search(name) is not None


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable holds a secret, by its name."""
    return _VARIABLE.search(name) is not None


def secrets_of(environment: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """Secrets as they may stand in texts, the longest first.

    Args:
        environment: variables.
        arguments: of the command line, among them overrides.
    """
    found = {value for name, value in environment.items() if is_secret_variable(name)}
    for argument in arguments:
        assigned = _ASSIGNMENT.match(argument)
        if assigned and is_secret_key(assigned[2]):
            found |= {text.strip("'\"") for text in (assigned[3], *assigned[3].split(","))}
        entries = _ENTRY.findall(argument)
        found |= {value.strip("'\"") for key, _, value in entries if is_secret_key(key)}
    return _longest_first(text for text in found if len(text) >= MIN_LENGTH)


def without(secrets: Iterable[str], text: str) -> str:
    """A text in which secrets, and the logins of URIs, are hidden."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _LOGIN.sub(f"{HIDDEN}@", text)


def known_secrets(more: Iterable[str] = ()) -> list[str]:
    """Those of this process's environment and command line, and `more`, in all their forms.

    The longest first; short ones are left out as in `secrets_of`.
    """
    secrets = {*more, *secrets_of(os.environ, sys.argv)}
    return _longest_first(form for form in _forms(secrets) if len(form) >= MIN_LENGTH)


def _forms(secrets: Iterable[str]) -> Iterator[str]:
    """Secrets as they are, as JSON and YAML write them, and their lines, if they are long."""
    for secret in secrets:
        yield from (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
        yield secret.replace("'", "''")
        lines = (line.strip() for line in secret.splitlines())
        yield from (line for line in lines if len(line) >= MIN_LENGTH)


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted({*texts}, key=len, reverse=True)


def without_secrets(text: str, more: Iterable[str] = ()) -> str:
    """A text without the secrets of this process's environment and command line, and `more`."""
    return without(known_secrets(more), text)


def argument_without_secret(argument: str) -> str:
    """A command-line argument with the value of a secret key hidden."""
    assigned = _ASSIGNMENT.match(argument)
    if assigned and is_secret_key(assigned[2]):
        return f"{assigned[1]}{assigned[2]}={HIDDEN}"
    return without_secrets(_ENTRY.sub(_entry_without_secret, argument))


def _entry_without_secret(entry: re.Match[str]) -> str:
    return f"{entry[1]}{entry[2]}{HIDDEN}" if is_secret_key(entry[1]) else entry[0]


def config_secrets(cfg: DictConfig) -> set[str]:
    """What the secret keys of a config hold, as it is written and as it is looked up."""
    found = {*secret_values(OmegaConf.to_container(cfg))}
    try:
        return found | {*secret_values(OmegaConf.to_container(cfg, resolve=True))}
    except OmegaConfBaseException:  # a problem of the config, which is reported where it is checked
        return found


def secret_values(tree: Any) -> Iterator[str]:
    """What the secret keys of plain data hold."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if is_secret_key(str(key)) and isinstance(value, str):
                yield value
            else:
                yield from secret_values(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from secret_values(value)


def hide_in_files(paths: Iterable[Path], of_config: Iterable[str]) -> None:
    """Hide a config's secrets, the environment's and the command line's in some files."""
    # Here short ones, too: such a file is the config.
    secrets = _longest_first([*_forms(filter(None, of_config)), *known_secrets()])
    for path in paths:
        text = path.read_text(encoding="utf-8")
        hidden = without(secrets, text)
        if hidden != text:
            path.write_text(hidden, encoding="utf-8")
