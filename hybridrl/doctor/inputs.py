"""Inputs stage: models, tokenizer, data, reward and the folders of a run. Nothing is downloaded."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from os.path import exists
from pathlib import Path
from statistics import fmean
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from hybridrl.config.checks.frozen_models import named_models
from hybridrl.config.checks.reward_model import NO_REWARD
from hybridrl.config.choices import Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.estimators import trains_on_answers
from hybridrl.config.planner.memory import gib
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.policy_losses import targets_of
from hybridrl.config.schema import EnvironmentConfig, ModelConfig, RewardConfig, RunConfig
from hybridrl.config.sections import DataConfig, MixturePart
from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.doctor import models
from hybridrl.doctor.findings import (
    Finding,
    Rule,
    apply,
    fail,
    fails_if,
    ok,
    skipped,
    warn,
    warns_if,
)
from hybridrl.doctor.host.facts import existing
from hybridrl.doctor.stages import CheckContext, gather
from hybridrl.environments.base import EnvironmentPool, StepRequest
from hybridrl.models.resolve import EMBEDDED, absolute_path, is_on_hub
from hybridrl.processes.pool import ProcessesError
from hybridrl.processes.texts import last_frame
from hybridrl.rewards.scorer import RewardScorer, rule_config

if TYPE_CHECKING:
    from hybridrl.data.sources.prompts import Prompt

# A node may have to convert a model first.
MODEL_TIMEOUT_S = 120.0
RUN_DIR = "hydra.run.dir="
TOKENIZER, DATA, REWARD = "inputs.tokenizer", "inputs.data", "inputs.reward"
NUM_ROWS = 8
QUESTION = "What is 2 + 2?"
BY_HAND = "Call it by hand on a row of the data; a response may be empty, or any text"
REMOVE_S = 30.0


def check(context: CheckContext) -> list[Finding]:
    """Make all checks inputs.*; if `context.quick`, inputs.cache only."""
    findings = _caches(context)
    if context.quick:
        return findings
    findings += _models(context)
    driver, config = context.agents.nodes[0], context.config
    findings += check_tokenizer(driver, config.model, context.shape)
    data, prompts = check_data(driver, config)
    findings += [*data, *check_reward(driver, config, prompts)]
    return [*findings, *check_run_directory(context.agents, run_folder(context))]


def run_folder(context: CheckContext) -> str:
    """Return hydra.run.dir, without components that only Hydra can resolve."""
    given = [o.removeprefix(RUN_DIR) for o in context.overrides if o.startswith(RUN_DIR)]
    folder = given[-1].strip("'\"") if given else f"outputs/{context.config.run.name}"
    fixed, marker, _ = folder.partition("${")
    return str(Path(fixed if not marker else fixed.rpartition("/")[0] or ".").absolute())


def _caches(context: CheckContext) -> list[Finding]:
    """Check inputs.cache: converted models and, if the hub is used, the Hugging Face cache."""
    own, findings = gather(context.agents, "inputs.cache", models.own_cache_facts)
    findings += models.judge_cache(own)
    if wanted := _hub_names(context):
        caches, silent = gather(context.agents, "inputs.cache", models.hub_cache_facts, wanted)
        findings += [*silent, *models.judge_cache(caches, models.hub_cache_facts(wanted))]
    return findings


def _model_paths(context: CheckContext) -> dict[str, bool]:
    """Return the run's models, with True for those that need weights."""
    own = {context.config.model.path: context.config.model.init is Init.pretrained}
    return own | {model.path: model.has_weights for model in named_models(context.config)}


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
    findings: list[Finding] = []
    for path, needs_weights in _model_paths(context).items():
        probe = (models.model_facts, absolute_path(path), needs_weights)
        facts, silent = gather(agents, "inputs.model", *probe, timeout_s=MODEL_TIMEOUT_S)
        findings += silent
        if facts:
            findings += (models.judge_cached if path in on_hub else models.judge_model)(path, facts)
    for name in (name for name, (kind, _) in on_hub.items() if kind == "dataset"):
        # Only the driver reads data.
        findings += models.judge_cached(name, {agents.nodes[0]: models.hub_facts(name, "dataset")})
    if not on_hub:
        findings.append(
            skipped("inputs.cache_contents", "all", "the run uses nothing from the hub")
        )
    return findings


def check_run_directory(agents: NodeProbes, folder: str) -> list[Finding]:
    """Check inputs.run_directory: write a file on each node, and look for the first's on all."""
    check = "inputs.run_directory"
    planted, findings = gather(agents, check, plant, folder)
    advice = f"Make it writable (chown, chmod), or set hydra.run.dir=/shared/run (now {folder})"
    written = {node: (path,) for node, (path, error) in planted.items() if not error}
    for node, (path, error) in planted.items():
        if error:
            findings.append(fail(check, node, f"{path}: {error}", advice))
    first, *others = agents.nodes
    if others and first in written:
        seen, silent = gather(agents, check, exists, *written[first])
        findings += silent
        for node in (node for node, is_seen in seen.items() if not is_seen):
            evidence = f"this node does not see files that {first} writes into {folder}: "
            evidence += "checkpoints need a shared folder"
            findings.append(warn(check, node, evidence, "hydra.run.dir=/shared/..., as on NFS"))
    agents.call_each(remove, written, timeout_s=REMOVE_S)
    shared = ", shared by all nodes" if others else ""
    return findings or [ok(check, "all", f"{folder}: writable{shared}")]


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


def check_tokenizer(node: str, model: ModelConfig, shape: ModelShape) -> list[Finding]:
    """Check inputs.tokenizer of model.path against the model's vocabulary."""
    from jinja2 import TemplateError

    from hybridrl.data.sources.tokenizer import Renderer, load_tokenizer
    from hybridrl.models.resolve import plain_folder
    from hybridrl.models.vocabulary import stop_token_ids

    copy = "Copy tokenizer.json and tokenizer_config.json of the model into its folder"
    try:
        tokenizer = load_tokenizer(model)
        renderer = Renderer(tokenizer)
        text = renderer.render([{"role": "user", "content": QUESTION}])
        ends = stop_token_ids(plain_folder(model.path))
    except ConfigError as error:
        return [fail(TOKENIZER, node, error.texts[0], copy)]
    except TemplateError as error:
        evidence = f"the chat template refuses a user's question: {error}"
        return [fail(TOKENIZER, node, evidence, copy)]
    ids = tokenizer.get_vocab().values()
    facts = f"{len(ids):,} tokens for a vocabulary of {shape.vocab:,}; {QUESTION!r} becomes "
    facts += f"{len(renderer.encode([text])[0])} tokens"
    alien = f"token {max(ids):,} is none of the model's {shape.vocab:,}"
    plain = f"there is no chat template: plain prompts; {facts}"
    template = "Choose an instruct model, or add chat_template.jinja to the model's folder"
    long = "no token ends a response: all have rollout.max_response_tokens"
    end = "Set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json"
    rules: list[Rule] = [
        (fails_if(max(ids) >= shape.vocab), alien, copy),
        (warns_if(not renderer.has_template), plain, template),
        (warns_if(not ends), long, end),
    ]
    return apply(TOKENIZER, node, rules, facts)


def check_data(node: str, config: RunConfig) -> "tuple[list[Finding], list[Prompt]]":
    """Check inputs.data; return findings and training prompts to try."""
    from hybridrl.data.sources.prompts import examine_prompts

    longest = config.rollout.max_response_tokens if trains_on_answers(config) else None
    limits = config.rollout.max_prompt_tokens, longest
    sets, problems = examine_prompts(config.data, config.model, *limits, targets_of(config))
    if sets is None:
        parts = [problem.partition("\n") for problem in problems]
        advice = "Correct data.* or the files"
        return [fail(DATA, node, problem, more or advice) for problem, _, more in parts], []
    sizes = [f"{path} ({gib(path.stat().st_size)})" for path in _files_of(config.data)]
    source = ", ".join(sizes) or ", ".join(facts.source for facts in sets.data_sets)
    evidence = f"{len(sets.train):,} training and {len(sets.held_out):,} held-out prompts: {source}"
    step = max(1, len(sets.train) // NUM_ROWS)
    return [ok(DATA, node, evidence)], sets.train[::step][:NUM_ROWS]


def sources(data: DataConfig) -> "list[DataConfig | MixturePart]":
    """Return the data sets of the config: those of the mixture, or the one."""
    return [*data.mixture.values()] or [data]


def _files_of(data: DataConfig) -> list[Path]:
    values = [value for part in sources(data) for value in (part.train_files, part.eval_files)]
    names = [[value] if isinstance(value, str | Path) else list(value or []) for value in values]
    return list(dict.fromkeys(Path(name).expanduser() for each in names for name in each))


def check_reward(node: str, config: RunConfig, prompts: "Sequence[Prompt]") -> list[Finding]:
    """Check inputs.reward: the reward or environment and the rules of conf/eval, on prompts."""
    if not prompts:
        return [skipped(REWARD, node, "there are no prompts to try it on")]
    findings: list[Finding] = []
    reward, rules = config.reward, config.eval.rules
    tried = {"reward": replace(reward, num_processes=1)} if not config.earns_rewards else {}
    tried |= {f"eval.rules.{name}": rule_config(reward, rule) for name, rule in rules.items()}
    try:
        if config.environment is not None:
            findings.append(_try_environment(node, config.environment, config, prompts))
        for key, rule in tried.items():
            findings.append(_try_rule(node, key, rule, config, prompts))
    except ConfigError as error:
        findings.append(fail(REWARD, node, error.texts[0], "Correct reward.* or eval.rules.*"))
    except ProcessesError as error:
        advice = "Check the imports of the function's module"
        findings.append(fail(REWARD, node, str(error), advice))
    return findings


def _try_rule(
    node: str, key: str, rule: RewardConfig, config: RunConfig, prompts: "Sequence[Prompt]"
) -> Finding:
    """Score reference answers, if there are any, in all their forms, and empty responses."""
    from hybridrl.app.reference_answers import references
    from hybridrl.trainer.rewarding import reward_items

    name = f"{key}.function = {rule.function}"
    empty = [""] * len(prompts)
    responses = [empty, *zip(*(references(config, prompt) for prompt in prompts), strict=False)]
    one = [texts[0] for texts in responses[:2]]
    with RewardScorer(rule) as scorer:
        # One row first: a function that hangs costs one timeout.
        failures = scorer.score(
            reward_items([prompts[0]] * len(one), one, [[]] * len(one))
        ).failures
        means = []
        for texts in responses if not failures else ():
            result = scorer.score(reward_items(prompts, texts, [[]] * len(prompts)))
            failures += result.failures
            means.append(fmean(result.scores))
    if failures:
        where = f" ({frame})" if (frame := last_frame(failures[0].traceback)) else ""
        reason = f"{name} fails: {failures[0].kind}: {failures[0].reason}{where}"
        return fail(REWARD, node, reason, BY_HAND)
    of_empty, *of_references = means
    if not of_references:
        return ok(REWARD, node, f"{name}, {len(prompts)} rows: empty responses score {of_empty:g}")
    best = max(of_references)
    evidence = (
        f"{name}, {len(prompts)} rows: reference answers score {best:g} on average, empty "
        f"responses {of_empty:g}"
    )
    if best <= of_empty and rule.function != NO_REWARD:
        advice = "Check that data.answer_key and reward.args match the function's form of answers"
        return warn(REWARD, node, evidence, advice)
    return ok(REWARD, node, evidence)


def _try_environment(
    node: str, environment: EnvironmentConfig, config: RunConfig, prompts: "Sequence[Prompt]"
) -> Finding:
    """Step an environment with reference answers and with empty turns."""
    name = f"environment.function = {environment.function}"
    function, args, timeout_s = environment.function, environment.args, config.reward.timeout_s
    with EnvironmentPool(function, args, timeout_s=timeout_s, num_processes=1) as pool:
        opened = pool.open([prompts[0].example])
        if not opened[0].failure:
            opened += pool.open([prompt.example for prompt in prompts[1:]])
        if failed := [reply.failure for reply in opened if reply.failure]:
            evidence = f"{name} fails: {failed[0]} in reset, for a row of the data"
            return fail(REWARD, node, evidence, BY_HAND)
        rows = [pair for pair in zip(opened, prompts, strict=True) if not pair[0].result.done]
        turns = [StepRequest(reply.state, p.answer) for reply, p in rows]
        turns += [StepRequest(reply.state, "") for reply, _ in rows]
        if failed := [reply.failure for reply in pool.step(turns) if reply.failure]:
            evidence = f"{name} fails: {failed[0]} in step, for an answer or an empty turn"
            return fail(REWARD, node, evidence, BY_HAND)
    return ok(REWARD, node, f"{name} answers {len(turns)} turns of {len(prompts)} rows")
