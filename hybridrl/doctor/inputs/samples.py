"""Tokenizer, data and reward at work on a few rows, in the process that would start the run."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hybridrl.config.checks.reward_model import NO_REWARD
from hybridrl.config.data_schema import DataConfig, MixturePart
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.memory import gib
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.schema import EnvironmentConfig, RunConfig
from hybridrl.doctor.findings import Finding, fail, ok, skipped, warn
from hybridrl.environments.base import StepRequest
from hybridrl.environments.pool import EnvironmentPool
from hybridrl.rewards.process import RewardProcessError
from hybridrl.rewards.scorer import Failure, RewardScorer

if TYPE_CHECKING:
    from hybridrl.data.sources.prompts import Prompt

NUM_ROWS = 8
QUESTION = "What is 2 + 2?"
# Reference answers as a model would write them: whole, GSM8K's mark, MATH's.
FORMS, EMPTY = ("{}", "#### {}", "\\boxed{{{}}}"), ""


def check_tokenizer(node: str, path: str, shape: ModelShape) -> list[Finding]:
    """inputs.tokenizer.

    Args:
        node: this one.
        path: model.path.
        shape: the model's.
    """
    from jinja2 import TemplateError

    from hybridrl.data.sources.tokenizer import Renderer, load_tokenizer

    check = "inputs.tokenizer"
    copy = "Copy tokenizer.json and tokenizer_config.json of the model into its folder"
    try:
        tokenizer = load_tokenizer(path)
        renderer = Renderer(tokenizer)
        text = renderer.render([{"role": "user", "content": QUESTION}])
    except ConfigError as error:
        return [fail(check, node, error.problems[0], copy)]
    except TemplateError as error:
        evidence = f"the chat template refuses a user's question: {error}"
        return [fail(check, node, evidence, copy)]
    ids = tokenizer.get_vocab().values()
    facts = (
        f"{len(ids):,} tokens for a vocabulary of {shape.vocab:,}; {QUESTION!r} becomes "
        f"{len(renderer.encode([text])[0])} tokens"
    )
    if max(ids) >= shape.vocab:
        evidence = f"token {max(ids):,} is none of the model's {shape.vocab:,}"
        return [fail(check, node, evidence, f"It is another model's. {copy}")]
    found = []
    if not renderer.has_template:
        advice = "Name an instruct model, or add chat_template.jinja to the model's folder"
        found.append(
            warn(check, node, f"there is no chat template: plain prompts; {facts}", advice)
        )
    if tokenizer.eos_token_id is None and not _ends_otherwise(path):
        evidence = "no token ends a response: all have rollout.max_response_tokens"
        advice = (
            "Name eos_token in tokenizer_config.json, or eos_token_id in generation_config.json"
        )
        found.append(warn(check, node, evidence, advice))
    return found or [ok(check, node, facts)]


def _ends_otherwise(path: str) -> bool:
    """Whether a file of the model names a token that ends responses."""
    from hybridrl.models.resolve import plain_folder
    from hybridrl.rollout.sampling import stop_token_ids

    return bool(stop_token_ids(plain_folder(path)))


def check_data(node: str, config: RunConfig) -> "tuple[list[Finding], list[Prompt]]":
    """inputs.data, and training prompts to try.

    Args:
        node: this one.
        config: of the run.
    """
    from hybridrl.data.sources.prompt_sets import examine_prompts

    check = "inputs.data"
    sets, problems = examine_prompts(
        config.data, config.model.path, config.rollout.max_prompt_tokens
    )
    if sets is None:
        found = []
        for problem in problems:
            evidence, _, advice = problem.partition("\n")
            found.append(fail(check, node, evidence, advice or "Look at data.* and the files"))
        return found, []
    sizes = [f"{path} ({gib(path.stat().st_size)})" for path in files_of(config.data)]
    source = ", ".join(sizes) or ", ".join(facts.source for facts in sets.data_sets)
    evidence = f"{len(sets.train):,} training and {len(sets.held_out):,} held-out prompts: {source}"
    step = max(1, len(sets.train) // NUM_ROWS)
    return [ok(check, node, evidence)], sets.train[::step][:NUM_ROWS]


def sources(data: DataConfig) -> "list[DataConfig | MixturePart]":
    """The data sets that the config names: those of the mixture, or the one."""
    return [*data.mixture.values()] or [data]


def files_of(data: DataConfig) -> list[Path]:
    """Every file that the config names."""
    found: list[Path] = []
    for part in sources(data):
        for value in (part.train_files, part.eval_files):
            names = [value] if isinstance(value, str | Path) else list(value or [])
            found += [Path(name).expanduser() for name in names]
    return list(dict.fromkeys(found))


def check_reward(node: str, config: RunConfig, prompts: "Sequence[Prompt]") -> list[Finding]:
    """inputs.reward: the reward or environment and the rules of conf/eval, on a few prompts."""
    check = "inputs.reward"
    if not prompts:
        return [skipped(check, node, "there are no prompts to try it on")]
    found: list[Finding] = []
    rules: dict[str, Any] = {f"eval.rules.{name}": r for name, r in config.eval.rules.items()}
    if config.environment is None:
        rules = {"reward": config.reward} | rules
    try:
        if config.environment is not None:
            found.append(_try_environment(node, config.environment, config, prompts))
        for key, rule in rules.items():
            found.append(_try_rule(node, key, rule.function, rule.args, config, prompts))
    except ConfigError as error:
        found.append(fail(check, node, error.problems[0], "Mend reward.* or eval.rules.*"))
    except RewardProcessError as error:
        evidence = str(error)
        found.append(fail(check, node, evidence, "Look at what the function's module imports"))
    return found


def _try_rule(
    node: str,
    key: str,
    function: str,
    args: dict[str, Any],
    config: RunConfig,
    prompts: "Sequence[Prompt]",
) -> Finding:
    """A reward on reference answers, as they are and in other forms, and on empty responses."""
    check = "inputs.reward"
    responses = {form: [_response(form, prompt) for prompt in prompts] for form in (*FORMS, EMPTY)}
    with RewardScorer(
        function, args, timeout_s=config.reward.timeout_s, num_processes=1, failed_score=0.0
    ) as scorer:
        # One row first: if that hangs, the others would, too.
        first = [(prompts[0].text, responses[f][0], prompts[0].example) for f in (FORMS[0], EMPTY)]
        failures = scorer.score(first).failures
        scores = {}
        for form, texts in responses.items() if not failures else ():
            rows = zip(prompts, texts, strict=True)
            result = scorer.score([(prompt.text, text, prompt.example) for prompt, text in rows])
            failures += result.failures
            scores[form] = fmean(result.scores)
    if failures:
        reason = f"{failures[0].kind}: {failures[0].reason}{_where(failures[0])}"
        return _broken(node, f"{key}.function = {function}", reason)
    empty = scores.pop(EMPTY)
    best = max(scores.values())
    evidence = (
        f"{key}.function = {function}, {len(prompts)} rows: reference answers score {best:g} on "
        f"average, empty responses {empty:g}"
    )
    if best <= empty and function != NO_REWARD:
        advice = (
            "See whether the reward reads data.answer_key as it is written, and in which form it "
            "wants answers (reward.args)"
        )
        return warn(check, node, evidence, advice)
    return ok(check, node, evidence)


def _response(form: str, prompt: "Prompt") -> str:
    """The reference answer: whole, or what stands behind GSM8K's mark in one of `FORMS`."""
    answer = str(prompt.example["answer"])
    return form.format(answer if form == FORMS[0] else answer.rpartition("####")[2].strip())


def _try_environment(
    node: str, environment: EnvironmentConfig, config: RunConfig, prompts: "Sequence[Prompt]"
) -> Finding:
    """An environment that is told the reference answer, and nothing."""
    name = f"environment.function = {environment.function}"
    with EnvironmentPool(
        environment.function,
        environment.args,
        timeout_s=config.reward.timeout_s,
        num_processes=1,
    ) as pool:
        opened = pool.open([prompts[0].example])
        if not opened[0].failure:
            opened += pool.open([prompt.example for prompt in prompts[1:]])
        if failed := [reply.failure for reply in opened if reply.failure]:
            return _broken(node, name, f"{failed[0]} in reset, for a row of the data")
        rows = [pair for pair in zip(opened, prompts, strict=True) if not pair[0].result.done]
        turns = [StepRequest(reply.state, str(p.example["answer"])) for reply, p in rows]
        turns += [StepRequest(reply.state, "") for reply, _ in rows]
        if failed := [reply.failure for reply in pool.step(turns) if reply.failure]:
            return _broken(node, name, f"{failed[0]} in step, for an answer or an empty turn")
    return ok("inputs.reward", node, f"{name} answers {len(turns)} turns of {len(prompts)} rows")


def _broken(node: str, what: str, reason: str) -> Finding:
    advice = "Call it by hand on a row of the data; a response may be empty, or anything else"
    return fail("inputs.reward", node, f"{what} fails: {reason}", advice)


def _where(failure: Failure) -> str:
    """The last line of its own code, from the traceback."""
    lines = [line.strip() for line in failure.traceback.splitlines() if line.startswith("  File")]
    return f" ({lines[-1]})" if lines else ""
