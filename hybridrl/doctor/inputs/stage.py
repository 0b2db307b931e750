"""Inputs stage: models, tokenizer, data, reward and the folders of a run."""

from pathlib import Path

from hybridrl.config.choices import Init
from hybridrl.doctor.context import CheckContext
from hybridrl.doctor.findings import Finding, skipped
from hybridrl.doctor.gather import gather
from hybridrl.doctor.inputs.folders import (
    check_run_directory,
    hub_cache_facts,
    judge_cache,
    own_cache_facts,
)
from hybridrl.doctor.inputs.models import (
    hub_facts,
    is_on_hub,
    judge_cached,
    judge_model,
    model_facts,
)
from hybridrl.doctor.inputs.samples import check_data, check_reward, check_tokenizer, sources
from hybridrl.models.resolve import EMBEDDED, absolute_path

# A node may have to convert a model first.
MODEL_TIMEOUT_S = 120.0
RUN_DIR = "hydra.run.dir="


def check(context: CheckContext) -> list[Finding]:
    """Make all checks inputs.*; if `context.quick`, inputs.cache only."""
    found = _caches(context)
    if context.quick:
        return found
    found += _models(context)
    driver, config = context.agents.nodes[0], context.config
    found += check_tokenizer(driver, config.model.path, context.shape)
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
        weightless = {path for path, weights in _model_paths(context).items() if not weights}
        probe = (hub_cache_facts, wanted, weightless)
        caches, silent = gather(context.agents, "inputs.cache", *probe)
        found += [*silent, *judge_cache(caches, hub_cache_facts(wanted, weightless))]
    return found


def _model_paths(context: CheckContext) -> dict[str, bool]:
    """Return the run's models, with True for those that need weights."""
    config = context.config
    paths = {config.model.path: config.model.init is Init.pretrained}
    return paths | ({config.reward_model.model.path: True} if config.reward_model else {})


def _hub_names(context: CheckContext) -> dict[str, str]:
    """Return names on the hub, each with "model" or "dataset"."""
    names = {path: "model" for path in _model_paths(context) if is_on_hub(path)}
    for part in sources(context.config.data):
        if part.train_files is None and part.name and part.name.partition("/")[0] != EMBEDDED:
            names["/".join(part.name.split("/")[:2])] = "dataset"
    return names


def _models(context: CheckContext) -> list[Finding]:
    """Check inputs.model and inputs.cache_contents."""
    agents, on_hub = context.agents, _hub_names(context)
    found: list[Finding] = []
    for path, needs_weights in _model_paths(context).items():
        probe = (model_facts, absolute_path(path), needs_weights)
        facts, silent = gather(agents, "inputs.model", *probe, timeout_s=MODEL_TIMEOUT_S)
        found += silent
        if facts:
            found += (judge_cached if path in on_hub else judge_model)(path, facts)
    for name in (name for name, kind in on_hub.items() if kind == "dataset"):
        # Only the driver reads data.
        found += judge_cached(name, {agents.nodes[0]: hub_facts(name, "dataset")})
    if not on_hub:
        found.append(skipped("inputs.cache_contents", "all", "the run uses nothing from the hub"))
    return found
