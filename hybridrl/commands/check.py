"""`hybridrl check`: what a run would read, how it would reward, and where its model begins.

prompts, lengths and rewards    as soon as the tokenizer is loaded
plan                            that of run.dry=true
the model before training       samples of some training problems; starts Ray and vLLM
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hybridrl.app.before_start import compose_line
from hybridrl.app.compose import examine_config
from hybridrl.app.data import check_data
from hybridrl.commands.running import CONFIG_DIR, OVERRIDES, argument, parsed, run_command
from hybridrl.config.checks.installation import check_installation
from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.command.provenance import provenance_of, recipe_files
from hybridrl.config.schema import RunConfig
from hybridrl.data.sources.tokenizer import load_tokenizer, token_ids
from hybridrl.models.resolve import absolute_path, model_folder
from hybridrl.plan.dry_run import show_plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.data.sources.prompts import Prompt, PromptSets
    from hybridrl.rewards.scorer import ScoreResult

DESCRIPTION = """\
Show what a run would read and reward, its plan, and how good its model is before training.

  hybridrl check +recipe=my_task
  hybridrl check +recipe=gsm8k_grpo data.train_files=train.jsonl --no-samples

Overrides as in `hybridrl train`.
"""
# Prompts shown as the model reads them, and problems whose answers are scored and sampled.
SHOWN, PROBLEMS = 10, 32
# Characters shown of a response, and of the end of its prompt; ids of a prompt at each end.
RESPONSE, PROMPT_END, IDS = 400, 80, 6


def main() -> None:
    """Run the command; exits by SystemExit unless all goes well."""
    run_command(lambda: _check(sys.argv[1:]))


def _check(argv: Sequence[str]) -> None:
    no_samples = argument("--no-samples", action="store_true", help="do not start the model")
    args = parsed("check", DESCRIPTION, OVERRIDES, no_samples, CONFIG_DIR, argv=argv)
    composed = compose_line(parse_argv(args.line))
    assert composed.cfg is not None and composed.hydra is not None and composed.machine is not None
    runtime = composed.hydra.runtime
    recipes = recipe_files(runtime.choices, runtime.config_sources)
    provenance = provenance_of(composed.overrides, recipes)
    result = examine_config(composed.cfg, composed.machine(), provenance)
    prompts, config = check_data(result), result.config
    console = Console(highlight=False, markup=False, soft_wrap=True)
    tokenizer = load_tokenizer(config.model)
    console.print("\n".join(_prompt_lines(prompts, tokenizer, config)))
    console.print("\n".join(_length_lines(prompts, tokenizer, config)))
    for line in _reward_lines(prompts.train[:PROBLEMS], config):
        console.print(line)
    show_plan(result, prompts)
    if not args.no_samples:
        check_installation(config.hardware.accelerator)
        model_folder(config.model)
        config.model.path = absolute_path(config.model.path)
        for line in _solve_lines(prompts, config):
            console.print(line)


def _prompt_lines(
    prompts: "PromptSets", tokenizer: "PreTrainedTokenizerBase", config: RunConfig
) -> Iterator[str]:
    """Yield some prompts as the model reads them, and what is wrong with all of them."""
    from hybridrl.health.findings import Health

    for prompt in prompts.train[:SHOWN]:
        ids = prompt.token_ids
        shown = [*ids[:IDS], "...", *ids[-IDS:]] if len(ids) > 2 * IDS else ids
        yield f"{prompt.where}: {len(ids)} tokens, {' '.join(map(str, shown))}"
        if prompt.images is None:
            yield f"  {tokenizer.decode(ids)!r}"
            continue
        yield f"  {prompt.text!r}"
        for file, tokens in zip(prompt.images.files, prompt.images.tokens, strict=True):
            source = f"{file.source}, " if isinstance(file.source, Path) else ""
            yield f"  image: {source}{file.size.width} x {file.size.height} pixels, {tokens} tokens"
    yield f"{prompts.measures['data/unknown_fraction']:.1%} unknown tokens in all prompts"
    findings = Health(config, []).examine(dict(prompts.measures), prompts.details)
    yield from (finding.text for finding in findings)


def _length_lines(
    prompts: "PromptSets", tokenizer: "PreTrainedTokenizerBase", config: RunConfig
) -> Iterator[str]:
    """Yield lengths of prompts and reference answers, in tokens, beside their limits."""
    every = [*prompts.train, *prompts.held_out]
    if tokens := [count for prompt in every if prompt.images for count in prompt.images.tokens]:
        seeing = sum(prompt.images is not None for prompt in every)
        yield (
            f"images: {len(tokens):,} in {seeing:,} of {len(every):,} prompts; median "
            f"{median(tokens):.0f}, most {max(tokens)} tokens"
        )
    answers = [prompt.answer_ids for prompt in every]  # of supervised fine-tuning
    if not any(answers):
        texts = [prompt.answer for prompt in every if prompt.answer]
        answers = token_ids(tokenizer, texts, special=False)
    for what, ids, key in (
        ("prompts", [p.token_ids for p in every], "max_prompt_tokens"),
        ("answers", answers, "max_response_tokens"),
    ):
        if not ids:  # the data has no answers
            continue
        lengths, limit = [*map(len, ids)], vars(config.rollout)[key]
        longer = sum(length > limit for length in lengths)
        yield (
            f"{what}: median {median(lengths):.0f}, longest {max(lengths)} tokens; "
            f"rollout.{key} = {limit}" + (f", which {longer} exceed" if longer else "")
        )


def _reward_lines(asked: "list[Prompt]", config: RunConfig) -> Iterator[str]:
    """Yield the rewards of reference answers, of wrong ones and of empty ones.

    The first line is the number of calls, before they are made: a judge may cost money.
    """
    from hybridrl.app.reference_answers import references

    if (program := config.environment or config.agent) is not None:
        yield f"reward: of conversations, by {program.function}"
        return
    # A bare answer also in the usual forms, because the reward may ask for one.
    forms = [*zip(*(references(config, prompt) for prompt in asked), strict=False)]
    counts = (3, 2 + len(forms)) if forms else (1, 1)  # without answers empty texts alone
    least, most = (len(asked) * count for count in counts)
    calls = f"{least} to {most}" if least < most else f"{least}"
    yield f"reward: {config.reward.function}, called for {calls} texts"
    answers, kinds = _scored_kinds(asked, forms, config)
    for kind, result in kinds.items():
        failed = f", {len(result.failures)} failed" if result.failures else ""
        yield (
            f"  {kind}: mean {fmean(result.scores):.3f}, from {min(result.scores):g} to "
            f"{max(result.scores):g}{failed}"
        )
    right, *wrong = (fmean(result.scores) for result in kinds.values())
    if answers and right <= max(wrong):
        yield (
            "  Reference answers are rewarded no higher than wrong ones: correct reward.function "
            "or data.answer_key."
        )
    elif answers and answers[0] != asked[0].answer:
        yield f"  Reference answers are written as the reward expects them, such as {answers[0]!r}."


def _scored_kinds(
    asked: "list[Prompt]", forms: Sequence[Sequence[str]], config: RunConfig
) -> "tuple[Sequence[str], dict[str, ScoreResult]]":
    """Score answers of three kinds; return the reference answers, and the results by kind.

    Reference answers are in the first of `forms` that earns more than empty ones, else the best.
    """
    from hybridrl.rewards.scorer import RewardScorer
    from hybridrl.trainer.rewarding import reward_items

    kinds: dict[str, ScoreResult] = {}
    answers: Sequence[str] = ()
    with RewardScorer(config.reward) as scorer:

        def scored(texts: Sequence[str]) -> "ScoreResult":
            return scorer.score(reward_items(asked, texts, [[]] * len(asked)))

        empty = scored([""] * len(asked))
        for form in forms:
            result = scored(form)
            best = kinds.get("reference answers")
            if best is None or fmean(result.scores) > fmean(best.scores):
                answers, kinds["reference answers"] = form, result
            if fmean(result.scores) > max(0.0, fmean(empty.scores)):
                break
        if answers:
            others = [
                next((other for other in (*answers[row:], *answers[:row]) if other != answer), "")
                for row, answer in enumerate(answers)
            ]
            kinds["answers of other problems"] = scored(others)
    return answers, kinds | {"empty answers": empty}


def _solve_lines(prompts: "PromptSets", config: RunConfig) -> Iterator[str]:
    """Yield the model's rewards before training, of some training problems, and two responses."""
    from hybridrl.commands.evaluation.session import COMPLETIONS, Evaluation, Split, evaluate
    from hybridrl.commands.evaluation.subject import Subject
    from hybridrl.controller.ray.runtime import ray_runtime

    asked, samples = prompts.train[:PROBLEMS], config.rollout.responses_per_prompt
    rules = "".join(f" and of the rule {name}" for name in config.eval.rules)
    calls = "" if config.earns_rewards else f": {len(asked) * samples} calls of the reward{rules}"
    yield f"before training: {len(asked)} problems x {samples} samples{calls}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subject = Subject("base", model=config.model.path)
        stack.enter_context(ray_runtime(config.cluster, config.hardware.accelerator))
        evaluation = Evaluation(subject, config, asked, folder, samples, split=Split.train)
        totals = evaluate(evaluation, lambda *_: None)
        lines = (folder / COMPLETIONS).read_text(encoding="utf-8").split("\n")[:-1]
    groups, least = totals.scores[""], evaluation.correct_at
    every = [score for group in groups for score in group]
    mixed = sum(len(set(group)) > 1 for group in groups)
    never, missed = (sum(of(group) < least for group in groups) for of in (max, min))
    yield f"  mean reward {fmean(every):.3f}"
    yield (
        f"  {mixed} of {len(groups)} prompts ({mixed / len(groups):.0%}) have responses with "
        f"different rewards; {never} are never solved, {len(groups) - missed} always (a reward of "
        f"at least {least:g})"
    )
    yield (
        f"  responses: {totals.tokens / len(every):.0f} tokens in the mean, "
        f"{totals.truncated / len(every):.0%} truncated"
    )
    yield from _sample_lines([json.loads(line) for line in lines])
    if samples > 1 and not mixed:
        yield (
            "  Without different rewards GRPO and its relatives would learn nothing: use easier or "
            "harder problems,\n  partial rewards (docs/rewards.md), a better model, or supervised "
            "training first (+recipe=gsm8k_sft)."
        )


def _sample_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the best response and the worst one to another prompt, shortened."""
    ordered = sorted(rows, key=lambda row: -float(row["scores"]["reward"]))
    others = [row for row in ordered if row["problem"] != ordered[0]["problem"]]
    for row in (ordered[0], *others[-1:]):
        yield (
            f"  reward {row['scores']['reward']:g}, {row['length']} tokens, after a prompt that "
            f"ends in {row['prompt'][-PROMPT_END:]!r}:"
        )
        text = row["response"]
        shown = text if len(text) <= RESPONSE else f"{text[:RESPONSE]}..."
        yield f"    {shown!r}"
