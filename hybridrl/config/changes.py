"""What differs between the config a checkpoint was made with and the one it is resumed with."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hybridrl.config.keys import leaves
from hybridrl.config.links import LINKS
from hybridrl.config.schema_keys import is_free

# Keys that are the first one's value unless they are set: told only where they differ from it.
FOLLOWING = {
    "seed": ("model.seed", "rollout.seed"),
    "trainer.total_steps": ("actor.total_steps", "critic.total_steps", "data.curriculum_steps"),
}
# Of a model's files so many are named.
MAX_FILES_SHOWN = 3


class Change(NamedTuple):
    """A key with another value, or of a path with other files behind it.

    Attributes:
        key: dotted.
        before, now: values as plain JSON; MISSING where there is no such key.
        matters: whether it changes what is computed, beyond rounding.
        files: names of those that are others than before.
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
    """The keys whose values differ, those that matter first, each by name.

    Args:
        before, now: resolved configs as plain JSON.
        files: those that are others than before, by the key of the path that they lie under.
    """
    old, new = _own_leaves(before), _own_leaves(now)
    differing = [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key, MISSING) != new.get(key, MISSING) or key in files
    ]
    followers = {
        leader: [key for key in keys if old.get(key) == old[leader] and new.get(key) == new[leader]]
        for leader, keys in FOLLOWING.items()
        if leader in differing and leader in old and leader in new
    }
    told = set(differing) - {key for keys in followers.values() for key in keys}
    found = [
        Change(
            key,
            old.get(key, MISSING),
            new.get(key, MISSING),
            key in files or any(_matters(one, new) for one in (key, *followers.get(key, ()))),
            files.get(key, ()),
        )
        for key in sorted(told)
    ]
    return sorted(found, key=lambda change: not change.matters)


def _own_leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves without those of shared nodes in roles, which stand where they are shared."""
    shared = {role: LINKS[role].keys() for role in LINKS}
    own = {
        name: {key: value for key, value in section.items() if key not in shared.get(name, ())}
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
