"""Trials of tokenizer, data and reward on a few rows, in the process that starts the run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from hybridrl.config.checks.reward_model import NO_REWARD
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.memory import gib
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.schema import EnvironmentConfig, ModelConfig, RewardConfig, RunConfig
from hybridrl.config.sections import DataConfig, MixturePart
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
from hybridrl.environments.base import EnvironmentPool, StepRequest
from hybridrl.processes.pool import ProcessesError
from hybridrl.processes.texts import last_frame
from hybridrl.rewards.scorer import RewardScorer, rule_config

if TYPE_CHECKING:
    from hybridrl.data.sources.prompts import Prompt

TOKENIZER, DATA, REWARD = "inputs.tokenizer", "inputs.data", "inputs.reward"
NUM_ROWS = 8
QUESTION = "What is 2 + 2?"
BY_HAND = "Call it by hand on a row of the data; a response may be empty, or any text"


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

    sets, problems = examine_prompts(config.data, config.model, config.rollout.max_prompt_tokens)
    if sets is None:
        parts = [problem.partition("\n") for problem in problems]
        advice = "Correct data.* or the files"
        return [fail(DATA, node, found, more or advice) for found, _, more in parts], []
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
    found: list[Finding] = []
    reward, rules = config.reward, config.eval.rules
    tried = {"reward": replace(reward, num_processes=1)} if not config.earns_rewards else {}
    tried |= {f"eval.rules.{name}": rule_config(reward, rule) for name, rule in rules.items()}
    try:
        if config.environment is not None:
            found.append(_try_environment(node, config.environment, config, prompts))
        for key, rule in tried.items():
            found.append(_try_rule(node, key, rule, config, prompts))
    except ConfigError as error:
        found.append(fail(REWARD, node, error.texts[0], "Correct reward.* or eval.rules.*"))
    except ProcessesError as error:
        advice = "Check the imports of the function's module"
        found.append(fail(REWARD, node, str(error), advice))
    return found


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
