"""Fifth stage: models, tokenizer, data, reward and the folders that a run reads and writes.

inputs_cache            caches: where, writable, whose
inputs_facts            models and data sets on a node
inputs_files            what that means
inputs_run_directory    whether nodes can write there, and see the same
inputs_samples          tokenizer, data and reward at work on a few rows
"""

from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.choices import Init
from hybridrl.controller.ray.node_probes import call_all
from hybridrl.doctor.findings import Finding
from hybridrl.doctor.host.stage import heard
from hybridrl.doctor.inputs.cache import hub_cache_facts, judge_cache, own_cache_facts
from hybridrl.doctor.inputs.facts import hub_facts, is_on_hub, model_facts
from hybridrl.doctor.inputs.files import judge_cached, judge_model, nothing_from_hub
from hybridrl.doctor.inputs.run_directory import check_run_directory
from hybridrl.doctor.inputs.samples import check_data, check_reward, check_tokenizer, sources
from hybridrl.doctor.stages import Case
from hybridrl.models.resolve import EMBEDDED, absolute_path

# A node may have to convert a model first.
MODEL_TIMEOUT_S = 120.0
RUN_DIR = "hydra.run.dir="


def check(case: Case) -> list[Finding]:
    """All checks inputs.*; if `case.quick`, inputs.cache alone."""
    found = _caches(case)
    if case.quick:
        return found
    found += _models(case)
    driver, config = case.agents.nodes[0], case.config
    found += check_tokenizer(driver, config.model.path, case.shape)
    data, prompts = check_data(driver, config)
    found += [*data, *check_reward(driver, config, prompts)]
    return [*found, *check_run_directory(case.agents, run_folder(case))]


def run_folder(case: Case) -> str:
    """Where the run's folder would be made: hydra.run.dir up to what only Hydra can fill in."""
    given = [o.removeprefix(RUN_DIR) for o in case.overrides if o.startswith(RUN_DIR)]
    folder = given[-1].strip("'\"") if given else f"outputs/{case.config.run.name}"
    fixed, marker, _ = folder.partition("${")
    return str(Path(fixed if not marker else fixed.rpartition("/")[0] or ".").absolute())


def _caches(case: Case) -> list[Finding]:
    """inputs.cache: that of models made here and, if the hub is needed, that of Hugging Face."""
    check, agents = "inputs.cache", case.agents
    own, found = heard(check, call_all(agents, own_cache_facts))
    found += judge_cache(own)
    if wanted := _hub_names(case):
        weightless = {path for path, weights in _model_paths(case).items() if not weights}
        answers = call_all(agents, hub_cache_facts, wanted, weightless)
        caches, silent = heard(check, answers)
        found += [*silent, *judge_cache(caches, hub_cache_facts(wanted, weightless))]
    return found


def _model_paths(case: Case) -> dict[str, bool]:
    """The run's models, and whether they need weights."""
    config = case.config
    paths = {config.model.path: config.model.init is Init.pretrained}
    return paths | ({config.reward_model.model.path: True} if config.reward_model else {})


def _hub_names(case: Case) -> dict[str, str]:
    """What the run takes from the hub: names, and model or dataset."""
    names = {path: "model" for path in _model_paths(case) if is_on_hub(path)}
    for part in sources(case.config.data):
        if part.train_files is None and part.name and part.name.partition("/")[0] != EMBEDDED:
            names["/".join(part.name.split("/")[:2])] = "dataset"
    return names


def _models(case: Case) -> Iterator[Finding]:
    """inputs.model and inputs.cache_contents."""
    on_hub = _hub_names(case)
    for path, needs_weights in _model_paths(case).items():
        answers = call_all(
            case.agents,
            model_facts,
            absolute_path(path),
            needs_weights,
            timeout_s=MODEL_TIMEOUT_S,
        )
        facts, silent = heard("inputs.model", answers)
        yield from silent
        if facts:
            judged = judge_cached(path, facts) if path in on_hub else judge_model(path, facts)
            yield from judged
    for name in (name for name, kind in on_hub.items() if kind == "dataset"):
        # The driver alone reads it.
        driver = case.agents.nodes[0]
        yield from judge_cached(name, {driver: hub_facts(name, "dataset")})
    if not on_hub:
        yield nothing_from_hub()
