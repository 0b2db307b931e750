"""What the files of models and data sets mean for a run, on each node and between nodes."""

from collections.abc import Iterator, Mapping

from hybridrl.config.planner.memory import gib
from hybridrl.doctor.findings import Finding, fail, ok, skipped, warn
from hybridrl.doctor.inputs.facts import FolderFacts

MAX_NAMED = 3


def judge_model(name: str, facts: Mapping[str, FolderFacts]) -> Iterator[Finding]:
    """inputs.model: whole on each node and, in local folders, equal on all.

    Args:
        name: of the model, as in the config.
        facts: by node, the driver's first.
    """
    check = "inputs.model"
    first = next(iter(facts.values()))
    copy = (
        f"Copy it anew from where it is whole: rsync -a --checksum <node>:{first.folder}/ "
        f"{first.folder}/; of a Git clone: git lfs pull"
    )
    for node, folder in facts.items():
        different = differences(folder, first)
        if folder.error:
            yield fail(check, node, folder.error, copy if first.folder else "Mend model.path")
        elif folder.faults:
            evidence = f"{name} in {folder.folder}: {some(folder.faults)}"
            yield fail(check, node, evidence, copy)
        elif different and not first.faults:
            evidence = f"{name} in {folder.folder} differs from {next(iter(facts))}'s: {different}"
            yield fail(check, node, evidence, copy)
        else:
            size = gib(sum(folder.files.values()))
            yield ok(check, node, f"{name}: {len(folder.files)} files, {size} in {folder.folder}")


def judge_cached(name: str, facts: Mapping[str, FolderFacts]) -> Iterator[Finding]:
    """inputs.cache_contents: a hub's model or data set, whole and the same on all nodes.

    Args:
        name: on the hub.
        facts: by node, the driver's first.
    """
    check = "inputs.cache_contents"
    cached = {node: folder for node, folder in facts.items() if not folder.error}
    first_node, first = next(iter(cached.items()), ("", None))
    fetch = f"hf download {name} on that node, or one HF_HOME that all nodes share"
    for node, folder in facts.items():
        if folder.error:
            if folder.is_offline:
                yield fail(
                    check, node, f"{folder.error}; HF_HUB_OFFLINE forbids to fetch it", fetch
                )
            else:
                yield warn(check, node, f"{folder.error}; it would be fetched first", fetch)
            continue
        assert first is not None
        different = differences(folder, first)
        if folder.faults:
            yield fail(check, node, f"{name} in {folder.folder}: {some(folder.faults)}", fetch)
        elif _commit(folder) != _commit(first):
            evidence = (
                f"{name} at commit {_commit(folder)[:8]}, on {first_node} at {_commit(first)[:8]}"
            )
            yield fail(check, node, evidence, f"{fetch}: all nodes need the same commit")
        elif different and not first.faults:
            yield fail(check, node, f"{name} differs from {first_node}'s: {different}", fetch)
        else:
            yield ok(check, node, f"{name} at commit {_commit(folder)[:8]}, whole")


def _commit(folder: FolderFacts) -> str:
    return folder.folder.rpartition("/")[2]


def differences(here: FolderFacts, there: FolderFacts) -> str:
    """In which files two folders differ, by names, sizes and fingerprints; empty if in none."""
    found = []
    sizes, others = here.files, there.files
    prints, other_prints = here.prints or {}, there.prints or {}
    for name in sorted({*sizes, *others}):
        if name not in sizes:
            found.append(f"{name} is missing here")
        elif name not in others:
            found.append(f"{name} is here alone")
        elif sizes[name] != others[name]:
            found.append(f"{name} has {sizes[name]:,} bytes here, {others[name]:,} there")
        elif _differ(prints.get(name), other_prints.get(name)):
            found.append(f"{name} has other contents here, in as many bytes")
    return some(found)


def _differ(here: str | None, there: str | None) -> bool:
    """Whether two fingerprints, where both are known, are those of unlike files."""
    return None not in (here, there) and here != there


def some(texts: "list[str] | tuple[str, ...]") -> str:
    """The first few of them, and how many more there are."""
    more = f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return "; ".join(texts[:MAX_NAMED]) + more


def nothing_from_hub() -> Finding:
    """inputs.cache_contents of a run that reads nothing from the hub."""
    return skipped("inputs.cache_contents", "all", "the run takes nothing from the hub")
