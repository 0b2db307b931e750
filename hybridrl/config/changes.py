"""Differences between the config of a checkpoint and that of the resuming run."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hybridrl.config.keys import leaves
from hybridrl.config.schema_keys import SHARED, is_free
from hybridrl.config.user_code.files import names_code

STEPS = "trainer.total_steps"
# key -> keys that link to it by default; those are reported only if they differ from it.
FOLLOWING = {
    "seed": ("model.seed", "rollout.seed"),
    STEPS: ("actor.total_steps", "critic.total_steps", "data.curriculum_steps"),
}
# Files named in a message.
MAX_FILES_SHOWN = 3


class Change(NamedTuple):
    """A key with another value, or a path with other files.

    Attributes:
        key: dotted.
        before, now: values as plain JSON; MISSING if there is no such key.
        matters: true if results change by more than rounding.
        files: names of the changed files.
    """

    key: str
    before: Any
    now: Any
    matters: bool
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.key} = {self.now}"
        if self.files:
            more = len(self.files) - MAX_FILES_SHOWN
            end = f" and {more} more" if more > 0 else ""
            text += f" (other files: {', '.join(self.files[:MAX_FILES_SHOWN])}{end})"
        return text if self.now == self.before else f"{text}, was {self.before}"


MISSING = "(not there)"


def changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    files: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> list[Change]:
    """Return the changes of resolved configs, those that matter first, sorted by key.

    `files` are changed files by the key of their folder's path, or of the code in them.
    """
    old, new = own_leaves(before), own_leaves(now)
    differing = [
        key
        for key in sorted(old.keys() | new.keys())
        if _unless_empty(old, key) != _unless_empty(new, key) or key in files
    ]
    followers = {
        leader: [key for key in keys if old.get(key) == old[leader] and new.get(key) == new[leader]]
        for leader, keys in FOLLOWING.items()
        if leader in differing and leader in old and leader in new
    }
    reported = set(differing) - {key for keys in followers.values() for key in keys}
    changed_keys = [
        Change(
            key,
            old.get(key, MISSING),
            new.get(key, MISSING),
            (key in files and not (names_code(key) and is_free(key)))
            or any(_matters(one, new) for one in (key, *followers.get(key, ()))),
            files.get(key, ()),
        )
        for key in sorted(reported)
    ]
    return sorted(changed_keys, key=lambda change: not change.matters)


def _unless_empty(config: Mapping[str, Any], key: str) -> Any:
    """Return a leaf; an empty section counts as missing, as in runs older than its key."""
    value = config.get(key, MISSING)
    return MISSING if value == {} else value


def may_grow(config: Mapping[str, Any]) -> bool:
    """Return whether a run of this resolved config can be resumed with more steps."""
    own = own_leaves(config)
    return not any(_matters(key, own) for key in FOLLOWING[STEPS] if own.get(key) == own[STEPS])


def own_leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves; those of shared nodes only once, outside of the roles."""
    own = {
        name: {key: item for key, item in section.items() if f"{name}.{key}" not in SHARED}
        if isinstance(section, Mapping)
        else section
        for name, section in config.items()
    }
    return leaves(own)


def _matters(key: str, config: Mapping[str, Any]) -> bool:
    if is_free(key):
        return False
    section, _, rest = key.partition(".")
    if rest == "total_steps":  # the length of a schedule that is not constant
        return config.get(f"{section}.optim.schedule") != "constant"
    if key == "data.curriculum_steps":
        return config.get("data.curriculum") is not None
    return True
