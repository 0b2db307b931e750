"""Data of a run: read and checked before workers start, by `examine_data`.

Heavy imports are inside functions, so that config errors appear at once.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from hybridrl.app.trials import trial_problems
from hybridrl.config.annotations import Unusable
from hybridrl.config.checks.frozen_models import named_models
from hybridrl.config.errors import ConfigError
from hybridrl.config.estimators import trains_on_answers
from hybridrl.config.load import Examined
from hybridrl.config.policy_losses import targets_of
from hybridrl.config.validate import set_steps
from hybridrl.distributed.background import without_collections
from hybridrl.models.resolve import takes_images

if TYPE_CHECKING:
    from hybridrl.data.sources.prompts import PromptSets

# Keys that the data needs.
DATA_NEEDS = ("data", "model", "rollout.max_prompt_tokens")


def check_data(result: Examined) -> "PromptSets":
    """Return the prompts of a config; ConfigError with every problem of config and data."""
    prompts = examine_data(result)
    if result.report.problems:
        raise ConfigError(*result.report.problems)
    assert prompts is not None
    return prompts


def examine_data(result: Examined) -> "PromptSets | None":
    """Return the prompts, if their keys are usable; add problems to the config's report."""
    if not result.report.usable(DATA_NEEDS):
        return None
    with without_collections():
        from hybridrl.data.sources.prompts import examine_prompts

    config, report, longest = result.config, result.report, None
    with suppress(Unusable):  # reported already
        longest = config.rollout.max_response_tokens if trains_on_answers(config) else None
    prompts, problems = examine_prompts(
        config.data,
        config.model,
        config.rollout.max_prompt_tokens,
        longest,
        targets_of(config),
    )
    teacher = config.teacher
    if prompts is not None and teacher is not None and report.usable(["teacher"]) and teacher.paths:
        from hybridrl.data.sources.teachers import with_teachers

        try:
            prompts = with_teachers(config, prompts)
        except ConfigError as error:
            problems += error.texts
    if prompts is not None and any(prompt.images for prompt in prompts.train):
        problems += _without_images(result)
    for text in problems:
        report.add(text, broken="data")
    if config.environment is not None and report.usable(["environment"]):
        from hybridrl.trainer.episodes.conversations import stop_problems

        for problem in stop_problems(config.model, config.environment):
            report.add(problem, broken="environment.stop")
    if prompts is not None and result.trains:
        set_steps(config, len(prompts.train), report)
    if prompts is not None and not report.problems:
        report.problems += trial_problems(config, (prompts.train or prompts.held_out)[0])
    return prompts


def _without_images(result: Examined) -> list[str]:
    """Report parts of a run that would read prompts without their images."""
    config, report = result.config, result.report
    if not report.usable(["teacher", "reward_model"]):
        return []
    return [
        f"{model.key} = {model.path} takes no images, and prompts have some.\n"
        "Name a model with the policy's tower, or leave the images out: data.images_key=null"
        for model in named_models(config)
        if not takes_images(model.path)
    ]
