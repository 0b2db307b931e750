"""Inputs stage: models, tokenizer, data, reward and the folders of a run."""

import os
import pwd
from collections.abc import Mapping
from contextlib import suppress
from os.path import exists
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

from huggingface_hub import constants

from hybridrl.config.choices import Init
from hybridrl.config.planner.memory import gib
from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.doctor.context import CheckContext, gather
from hybridrl.doctor.findings import (
    Finding,
    Rule,
    Verdict,
    fail,
    first,
    ok,
    skipped,
    warn,
    warns_if,
)
from hybridrl.doctor.host.facts import DiskSpace, disk_space, existing, write_error
from hybridrl.doctor.inputs import models
from hybridrl.doctor.inputs.samples import check_data, check_reward, check_tokenizer, sources
from hybridrl.models.cache import cache_folder
from hybridrl.models.resolve import EMBEDDED, absolute_path, is_on_hub

# A node may have to convert a model first.
MODEL_TIMEOUT_S = 120.0
RUN_DIR = "hydra.run.dir="
REMOVE_S = 30.0


class CacheFacts(NamedTuple):
    """A cache folder as seen by processes of a node.

    `variable` sets its path; `space` has the error of writing there by `user`; `owner` is that of
    the nearest existing parent; `lacking` are models and datasets to be downloaded.
    """

    variable: str
    name: str
    space: DiskSpace
    owner: str
    user: str
    lacking: tuple[str, ...]


def check(context: CheckContext) -> list[Finding]:
    """Make all checks inputs.*; if `context.quick`, inputs.cache only."""
    found = _caches(context)
    if context.quick:
        return found
    found += _models(context)
    driver, config = context.agents.nodes[0], context.config
    found += check_tokenizer(driver, config.model, context.shape)
    data, prompts = check_data(driver, config)
    found += [*data, *check_reward(driver, config, prompts)]
    return [*found, *check_run_directory(context.agents, run_folder(context))]


def run_folder(context: CheckContext) -> str:
    """Return hydra.run.dir, without components that only Hydra can resolve."""
    given = [o.removeprefix(RUN_DIR) for o in context.overrides if o.startswith(RUN_DIR)]
    folder = given[-1].strip("'\"") if given else f"outputs/{context.config.run.name}"
    fixed, marker, _ = folder.partition("${")
    return str(Path(fixed if not marker else fixed.rpartition("/")[0] or ".").absolute())


def _caches(context: CheckContext) -> list[Finding]:
    """Check inputs.cache: converted models and, if the hub is used, the Hugging Face cache."""
    own, found = gather(context.agents, "inputs.cache", own_cache_facts)
    found += judge_cache(own)
    if wanted := _hub_names(context):
        caches, silent = gather(context.agents, "inputs.cache", hub_cache_facts, wanted)
        found += [*silent, *judge_cache(caches, hub_cache_facts(wanted))]
    return found


def _model_paths(context: CheckContext) -> dict[str, bool]:
    """Return the run's models, with True for those that need weights."""
    config = context.config
    paths = {config.model.path: config.model.init is Init.pretrained}
    return paths | ({config.reward_model.model.path: True} if config.reward_model else {})


def _hub_names(context: CheckContext) -> dict[str, tuple[str, bool]]:
    """Return names on the hub, each with "model" or "dataset", and True if it needs weights."""
    paths = _model_paths(context).items()
    names = {path: ("model", weights) for path, weights in paths if is_on_hub(path)}
    for part in sources(context.config.data):
        if part.train_files is None and part.name and part.name.partition("/")[0] != EMBEDDED:
            names["/".join(part.name.split("/")[:2])] = ("dataset", False)
    return names


def _models(context: CheckContext) -> list[Finding]:
    """Check inputs.model and inputs.cache_contents."""
    agents, on_hub = context.agents, _hub_names(context)
    found: list[Finding] = []
    for path, needs_weights in _model_paths(context).items():
        probe = (models.model_facts, absolute_path(path), needs_weights)
        facts, silent = gather(agents, "inputs.model", *probe, timeout_s=MODEL_TIMEOUT_S)
        found += silent
        if facts:
            found += (models.judge_cached if path in on_hub else models.judge_model)(path, facts)
    for name in (name for name, (kind, _) in on_hub.items() if kind == "dataset"):
        # Only the driver reads data.
        found += models.judge_cached(name, {agents.nodes[0]: models.hub_facts(name, "dataset")})
    if not on_hub:
        found.append(skipped("inputs.cache_contents", "all", "the run uses nothing from the hub"))
    return found


def hub_cache_facts(wanted: Mapping[str, tuple[str, bool]]) -> CacheFacts:
    """Examine the Hugging Face cache for names as of `_hub_names`."""
    lacking = tuple(name for name, needed in wanted.items() if models.lacks(name, *needed))
    return _facts("HF_HOME", "Hugging Face cache", Path(constants.HF_HUB_CACHE), lacking)


def own_cache_facts() -> CacheFacts:
    """Examine the cache of converted models and compiled kernels."""
    return _facts("HYBRIDRL_CACHE", "hybridrl's cache", cache_folder())


def _facts(variable: str, name: str, folder: Path, lacking: tuple[str, ...] = ()) -> CacheFacts:
    there, locks = existing(folder), folder / ".locks"
    places = [there, locks] if locks.is_dir() else [there]
    errors = [f"{place}: {error}" for place in places if (error := write_error(place))]
    return CacheFacts(
        variable,
        name,
        disk_space(there)._replace(folder=str(folder), error="; ".join(errors)),
        _user(there.stat().st_uid),
        _user(os.geteuid()),
        lacking,
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def judge_cache(
    facts: Mapping[str, CacheFacts], drivers: CacheFacts | None = None
) -> list[Finding]:
    """Judge inputs.cache of each node; `drivers`, if given, must have the same path."""
    found = []
    for node, cache in facts.items():
        path, _, free, error = cache.space
        drivers_path = path if drivers is None else drivers.space.folder
        evidence = f"{cache.name} ({cache.variable}): {path} (owner {cache.owner}), "
        evidence += f"{gib(free)} free"
        use = "compiled kernels go there" if drivers is None else "all files that it needs exist"
        use = f"{', '.join(cache.lacking)} must be downloaded" if cache.lacking else use
        unwritable = Verdict.fail if cache.lacking else Verdict.warn
        rules: list[Rule] = [
            (
                unwritable if error else None,
                f"{evidence}; {cache.user} cannot write: {error}; {use}",
                f"chown -R {cache.user} {path}, or set {cache.variable} to a writable folder",
            ),
            (
                warns_if(path != drivers_path),
                f"{evidence}; the driver uses {drivers_path}",
                f"export {cache.variable}=... the same on all nodes, before `ray start`",
            ),
        ]
        found.append(first("inputs.cache", node, rules, evidence))
    return found


def check_run_directory(agents: NodeProbes, folder: str) -> list[Finding]:
    """Check inputs.run_directory: write a file on each node, and look for the first's on all."""
    check = "inputs.run_directory"
    planted, found = gather(agents, check, plant, folder)
    advice = f"Make it writable (chown, chmod), or set hydra.run.dir=/shared/run (now {folder})"
    written = {node: (path,) for node, (path, error) in planted.items() if not error}
    for node, (path, error) in planted.items():
        if error:
            found.append(fail(check, node, f"{path}: {error}", advice))
    first, *others = agents.nodes
    if others and first in written:
        seen, silent = gather(agents, check, exists, *written[first])
        found += silent
        for node in (node for node, is_seen in seen.items() if not is_seen):
            evidence = f"this node does not see files that {first} writes into {folder}: "
            evidence += "checkpoints need a shared folder"
            found.append(warn(check, node, evidence, "hydra.run.dir=/shared/..., as on NFS"))
    agents.call_each(remove, written, timeout_s=REMOVE_S)
    shared = ", shared by all nodes" if others else ""
    return found or [ok(check, "all", f"{folder}: writable{shared}")]


def plant(folder: str) -> tuple[str, str]:
    """Write a file into a folder or its nearest existing parent; return its path and the error."""
    there = existing(Path(folder))
    try:
        with NamedTemporaryFile(dir=there, prefix=".hybridrl-doctor-", delete=False) as file:
            file.write(b"doctor")
    except OSError as error:
        return str(there), error.strerror or str(error)
    return file.name, ""


def remove(path: str) -> None:
    """Delete a planted file."""
    with suppress(OSError):
        Path(path).unlink()
