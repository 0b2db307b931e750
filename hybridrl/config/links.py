"""Shared nodes: roles link to them, and must not have copies."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from hybridrl.config.keys import raw_tree

# role -> keys that must link to the node of the same name
LINKS = {
    "actor": ("model", "fsdp", "lora", "algorithm"),
    "critic": ("model", "fsdp"),
    "ref": ("model", "fsdp", "lora"),
    "rollout": ("model", "lora"),
    "reward_model": ("fsdp",),
}
REASONS = {
    "model": "every role must start from the same weights",
    "fsdp": "roles must shard alike, or the reshard plan is wrong",
    "algorithm": "loss and penalty are checked and reported from algorithm",
    "lora": "reference and vLLM use the actor's adapters",
}


def link_problems(cfg: DictConfig) -> Iterator[str]:
    """Find roles without the link to a shared node, in the unresolved config.

    A role has the shared spec by `fsdp: ${fsdp}`. A recipe that sets a key below it, or a
    `++role.fsdp.key=` override, replaces the link by a copy. Later changes of `fsdp` do not reach
    the copy, so even an equal copy is a problem.
    """
    raw = raw_tree(cfg)
    for role, links in LINKS.items():
        section = raw.get(role)
        for name in links:
            found = section.get(name) if isinstance(section, dict) else None
            if found is not None and found != f"${{{name}}}":
                yield _problem(f"{role}.{name}", name, found, raw.get(name))


def restore_links(tree: dict[str, Any]) -> None:
    """Replace roles' copies of shared nodes by links where they are equal, in a resolved config."""
    for role, links in LINKS.items():
        section = tree.get(role) or {}
        for name in links:
            if name in section and section[name] == tree.get(name):
                section[name] = f"${{{name}}}"


def _problem(key: str, target: str, found: Any, shared: Any) -> str:
    what, keys = f"{key} = {found}, expected the link ${{{target}}}", key
    if isinstance(found, dict) and isinstance(shared, dict):
        differing = [
            f"{k}={v} (shared: {shared.get(k)})" for k, v in found.items() if v != shared.get(k)
        ]
        values = ", ".join(differing) or "same values"
        what, keys = f"{key} is a copy of the shared {target}: {values}", f"{key}.*"
    return (
        f"{what}.\n{REASONS[target].capitalize()}.\n"
        f"Remove {keys} from the recipe or command line and set {target}.* instead."
    )
