"""Shared nodes: roles link to them, and must not have copies."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

# role -> key -> the node that it must link to
LINKS: dict[str, dict[str, str]] = {
    "actor": {
        "model": "model",
        "fsdp": "fsdp",
        "lora": "lora",
        "algorithm": "algorithm",
    },
    "critic": {"model": "model", "fsdp": "fsdp"},
    "ref": {"model": "model", "fsdp": "fsdp", "lora": "lora"},
    "rollout": {"model": "model", "lora": "lora"},
    "reward_model": {"fsdp": "fsdp"},
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
    raw = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(raw, dict)
    for role, links in LINKS.items():
        section = raw.get(role)
        if not isinstance(section, dict):
            continue
        for name, target in links.items():
            found = section.get(name)
            if found is not None and found != f"${{{target}}}":
                yield _problem(cfg, role, name, target, found)


def _problem(cfg: DictConfig, role: str, name: str, target: str, found: Any) -> str:
    key = f"{role}.{name}"
    what, keys = f"{key} = {found}, expected the link ${{{target}}}", key
    if not isinstance(found, str):
        shared = OmegaConf.select(cfg, target, throw_on_resolution_failure=False) or {}
        own = found if isinstance(found, dict) else {}
        differing = [
            f"{k}={v} (shared: {shared.get(k)})" for k, v in own.items() if v != shared.get(k)
        ]
        values = ", ".join(differing) or "same values"
        what, keys = f"{key} is a copy of the shared {target}: {values}", f"{key}.*"
    return (
        f"{what}.\n{REASONS[name].capitalize()}.\n"
        f"Remove {keys} from the recipe or command line and set {target}.* instead."
    )
