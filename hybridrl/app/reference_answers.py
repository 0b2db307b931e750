"""Rewards of reference answers: before the first rollout, one problem of each data set."""

from functools import partial

from hybridrl.config.schema import RunConfig
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.values import column_text
from hybridrl.trainer.rewarding import FunctionRewards
from hybridrl.trainer.tracking.console import RunConsole

# Characters of a question or an answer in a message.
SHOWN = 50
# Final answers of at most this many characters on one line are written in the usual forms, too.
LONGEST_FINAL = 40
FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")


def show_reference_rewards(
    config: RunConfig, prompts: list[Prompt], rewards: FunctionRewards, console: RunConsole
) -> None:
    """Score the reference answer of the first problem of each data set; print a line for each.

    A worked solution is scored as it stands. The final answer is scored in the usual forms, too,
    because the reward may ask for one of them; the best one counts. Data sets without answers are
    left out.
    """
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.dataset, prompt)
    for prompt in filter(partial(references, config), first.values()):
        _show(config, prompt, rewards, console)


def _show(config: RunConfig, prompt: Prompt, rewards: FunctionRewards, console: RunConsole) -> None:
    answer, *forms = references(config, prompt)
    name = f"{prompt.dataset}: " if prompt.dataset else ""
    what = f"{name}reference answer of {_start(prompt.question)} ({prompt.where})"
    function = f"reward.function = {config.reward.function}"
    first = rewards.score_texts(prompt, [answer])
    if first.failures:
        console.warn(
            f"{what}: the reward fails: {first.failures[0].reason}\nCheck that {function} fits "
            f"the data; its columns are {', '.join(prompt.example)}."
        )
        return
    score = first.scores[0]
    if score > 0:
        console.note(f"{what}: reward {score:g}")
        return
    *others, empty = rewards.score_texts(prompt, [*forms, ""]).scores
    best, written = max(zip(others, forms, strict=True), default=(score, answer))
    if max(best, score) > max(0.0, empty) or score > empty:
        as_form = f", written as {_start(written)}" if best > score else ""
        console.note(f"{what}: reward {max(best, score):g}{as_form}")
        return
    tried = " and ".join(map(_start, (answer, *forms)))
    console.warn(
        f"{what}: reward {score:g}, not more than for an empty response ({empty:g}); tried "
        f"{tried}.\nIf {function} judges answers, it does not fit this data. Check its arguments, "
        f"data.answer_key = {config.data.answer_key}, and the form of answer that it expects."
    )


def references(config: RunConfig, prompt: Prompt) -> list[str]:
    """Return a problem's worked solution and answer, then its final answer in usual forms.

    There may be none.
    """
    data, answer = config.data, prompt.answer
    part = data.mixture.get(prompt.dataset)
    key = (part and part.solution_key) or data.solution_key
    solution = column_text(prompt.example, key) if key else ""
    final = answer.rpartition("####")[2].strip()
    is_short = len(final) <= LONGEST_FINAL and "\n" not in final
    forms = [form.format(final) for form in FORMS] if is_short else []
    return list(dict.fromkeys(filter(None, [solution, answer, *(forms if answer else [])])))


def _start(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}...")
