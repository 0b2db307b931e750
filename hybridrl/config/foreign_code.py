"""Code that a config of unknown origin names: imported and run by whoever uses the config."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.keys import leaves

# Keys whose texts are dotted paths, by their last word; and one that is a name or a path.
NAMES_CODE = ("function", "worker")
ESTIMATOR = "algorithm.advantage"
OURS = "hybridrl."


def foreign_code(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The dotted paths in a config that lead out of hybridrl: key and path."""
    for key, value in leaves(config).items():
        is_path = key.rpartition(".")[2] in NAMES_CODE or key == ESTIMATOR
        if is_path and isinstance(value, str) and "." in value and not value.startswith(OURS):
            yield key, value


def refuse_foreign_code(
    config: Mapping[str, Any], origin: str, overrides: Sequence[str] = ()
) -> None:
    """Let only code of hybridrl be run, and what the command line itself names.

    Args:
        config: plain or resolved, as far as it is used.
        origin: where it comes from, for the text.
        overrides: of the command line.

    Raises:
        ConfigError: the config names other code.
    """
    given = [override.split("=")[0].lstrip("+~") for override in overrides]
    found = [
        f"{key} = {path}"
        for key, path in foreign_code(config)
        if not any(key == name or key.startswith(f"{name}.") for name in given)
    ]
    if found:
        raise ConfigError(
            f"{origin} names code that is not hybridrl's: {', '.join(found)}.\n"
            f"It would be imported and run, with your rights.\n"
            f"If you trust whoever made it, add --run-code."
        )
