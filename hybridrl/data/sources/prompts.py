"""Prompts of a run: problems rendered by the chat template, tokenised and counted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from hybridrl.config.choices import Targets, TooLongPrompts
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.families import placeholder_ids, text_part
from hybridrl.config.schema import ModelConfig
from hybridrl.config.sections import DataConfig
from hybridrl.data.sources.image_tokens import ImageProcessor, PromptFiles
from hybridrl.data.sources.images import images_in, keys_of
from hybridrl.data.sources.problem_sets import DataSet, left_out_text, load_problem_sets
from hybridrl.data.sources.rows import Message, Problem, first_faults, with_examples
from hybridrl.data.sources.tokenizer import Renderer, load_tokenizer
from hybridrl.data.sources.turns import AnswerTokens
from hybridrl.models.resolve import read_model_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """Rendered and tokenised problem.

    Attributes:
        prompt_id: unique over training and held-out prompts, stable over the run.
        token_ids: of the rendered prompt, those of images expanded; at most
            rollout.max_prompt_tokens.
        text: the rendered prompt, with one placeholder for each image.
        question: the problem without template, for display.
        example: the row with `answer`, if the data has one, and `dataset`, its data set's name;
            argument of rewards.
        tags: groups whose accuracy is reported separately, such as {"range": "unseen"}.
        dataset: its name in data.mixture; empty without a mixture.
        difficulty: larger is harder; 0 without a curriculum.
        where: `file:line` or similar, for messages.
        answer_ids: token ids of the reference answer with its end token, or of a pair's better
            response, or of a labelled response; empty unless asked for.
        rejected_ids: of a pair's worse response; empty without one.
        is_desired: label of a response; None without one.
        messages: the problem as chat messages, before the template.
        teacher: index of the teacher that scores its responses.
        teacher_ids: what that one reads in place of token_ids; empty if nothing else.
        has_answer: false if the data has no answers, whatever columns `example` has.
        images: None without.
    """

    prompt_id: int
    token_ids: list[int]
    text: str
    question: str
    example: dict[str, Any]
    tags: dict[str, str]
    dataset: str = ""
    difficulty: float = 0.0
    where: str = ""
    answer_ids: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    has_answer: bool = True
    teacher: int = 0
    teacher_ids: list[int] = field(default_factory=list)
    rejected_ids: list[int] = field(default_factory=list)
    is_desired: bool | None = None
    images: PromptFiles | None = None

    @property
    def image_keys(self) -> tuple[str, ...]:
        """Hashes of its images."""
        return tuple(file.key for file in self.images.files) if self.images else ()

    @property
    def responses(self) -> list[tuple[list[int], bool]]:
        """Responses that are trained on, each with whether it is preferred; better ones first."""
        worse = [(self.rejected_ids, False)] if self.rejected_ids else []
        return [(self.answer_ids, self.is_desired is not False), *worse]

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest response that is trained on."""
        return max(len(self.answer_ids), len(self.rejected_ids))

    @property
    def answer(self) -> str:
        """Reference answer; empty if the data has none."""
        return str(self.example.get("answer") or "") if self.has_answer else ""


@dataclass(frozen=True)
class DataSetSummary:
    """Origin and prompt counts of one data set of a run; names and shares as in `DataSet`.

    `train` and `held_out` count the prompts used, the others those left out, by reason.
    """

    name: str
    source: str
    share: float
    train: int
    held_out: int
    left_out: dict[str, int] = field(default_factory=dict)
    held_out_left_out: dict[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """Format share, origin and counts."""
        share = f"{self.name}, {100 * self.share:.3g} % of the prompts, " if self.name else ""
        return f"{share}{self.source}: {self.train:,} training, {self.held_out:,} held out"


@dataclass(frozen=True)
class PromptSets:
    """Prompts of a run.

    Attributes:
        train, held_out: prompts of all data sets.
        data_sets: summary of each data set.
        notes: remarks on splits and left-out problems, for the user.
        template: origin of the chat template, for the user.
        measures: metrics data/... for the health checks.
        details: more about these, by check.
    """

    train: list[Prompt]
    held_out: list[Prompt]
    data_sets: list[DataSetSummary]
    notes: list[str] = field(default_factory=list)
    template: str = ""
    measures: dict[str, float | None] = field(default_factory=dict)
    details: dict[str, Callable[[], str]] = field(default_factory=dict)


def load_prompts(
    config: DataConfig,
    model: ModelConfig,
    max_prompt_tokens: int,
    max_answer_tokens: int | None = None,
    targets: Targets = Targets.answers,
) -> PromptSets:
    """Read, filter, render and tokenise a run's problems, with the model's chat template.

    With `max_answer_tokens`, the limit in training, also their `targets`.

    Raises:
        ConfigError: files, rows, model path or lengths are wrong; lists all problems of a stage.
    """
    sets = load_problem_sets(config, None if max_answer_tokens is None else targets)
    tokenizer, options = load_tokenizer(model), config.chat_template_kwargs
    renderer = Renderer(tokenizer, options)
    answers = None if max_answer_tokens is None else AnswerTokens(model, tokenizer, options)
    sees = any(keys_of(p.prompt) for each in sets.values() for p in (*each.train, *each.held_out))
    processor = ImageProcessor(model) if sees else None
    rendered = _rendered(config, sets, renderer, answers, processor)
    kept, faults = PromptSets([], [], [], template=renderer.description), list[str]()
    for name, (train, held_out) in rendered.items():
        _note_unknown_tokens(kept, [*train, *held_out], renderer)
        faults += _without_embedding(model, tokenizer, [*train, *held_out])
        faults += _with_placeholders(model, [*train, *held_out])
        faults += _keep_short(
            sets[name], train, held_out, max_prompt_tokens, max_answer_tokens, kept
        )
    if not faults:
        faults = [
            text
            for summary in kept.data_sets
            for text in _too_few(summary, sets[summary.name], max_prompt_tokens)
        ]
    if faults:
        raise ConfigError(*faults)
    for summary in kept.data_sets:
        kept.notes.extend(_notes(summary, sets[summary.name]))
    known = {(prompt.text, prompt.image_keys) for prompt in kept.train}
    shared = sum((prompt.text, prompt.image_keys) in known for prompt in kept.held_out)
    kept.measures["data/duplicate_fraction"] = 1 - len(known) / len(kept.train)
    kept.measures["data/overlap_fraction"] = shared / len(kept.held_out)
    kept.measures["data/no_generation_marker"] = float(renderer.lacks_marker)
    return kept


def examine_prompts(
    config: DataConfig,
    model: ModelConfig,
    max_prompt_tokens: int,
    max_answer_tokens: int | None = None,
    targets: Targets = Targets.answers,
) -> tuple[PromptSets | None, list[str]]:
    """Return a run's prompts, or None and messages for a ConfigError."""
    try:
        return load_prompts(config, model, max_prompt_tokens, max_answer_tokens, targets), []
    except ConfigError as error:
        return None, error.texts


def _rendered(
    config: DataConfig,
    sets: dict[str, DataSet],
    renderer: Renderer,
    answers: AnswerTokens | None,
    processor: ImageProcessor | None,
) -> dict[str, tuple[list[Prompt], list[Prompt]]]:
    """Render the training and held-out prompts of each data set by name.

    Ids are consecutive, those of all training prompts first.

    Raises:
        ConfigError: the chat template raises, or a system prompt or an option has no effect.
    """
    faults, next_id = [*_unused_system_prompts(config, sets), *renderer.unused_options()], 0
    halves: list[dict[str, list[Prompt]]] = []
    for half_of in (attrgetter("train"), attrgetter("held_out")):
        halves.append({})
        for name, data in sets.items():
            problems = half_of(data)
            prompts, refused = _prompts_of(data, problems, renderer, next_id, answers)
            if processor is not None:
                prompts, unseen = _with_images(prompts, processor)
                refused += unseen
            halves[-1][name] = prompts
            next_id += len(problems)
            faults += map(data.with_own_keys, refused)
    if faults:
        raise ConfigError(*faults)
    return {name: (halves[0][name], halves[1][name]) for name in sets}


def _prompts_of(
    data: DataSet,
    problems: Sequence[Problem],
    renderer: Renderer,
    first_id: int,
    answers: AnswerTokens | None,
) -> tuple[list[Prompt], list[str]]:
    """Render and tokenise problems of a data set; return prompts and messages for a ConfigError.

    Ids are consecutive from `first_id`. With `answers` prompts have their reference answers.
    """
    asked: list[list[Message]] = []
    texts, turns, worse, refused = list[str](), list[str](), list[str](), list[str]()
    for problem in problems:
        messages = with_examples(problem.messages(data.config.system_prompt), data.examples)
        try:
            texts.append(renderer.render(messages))
            asked.append(messages)
            if answers is not None:
                turns.append(answers.turn(messages, texts[-1], problem.reference))
                if problem.rejected:
                    worse.append(answers.turn(messages, texts[-1], problem.rejected))
        except TemplateError as error:
            refused.append(f"{problem.where}: {error}")
    if refused:
        count = len(refused)
        return [], [
            f"the model's chat template refuses {count} prompt{'s' if count != 1 else ''}.\n"
            f"{first_faults(refused)}\n"
            "Correct these messages. If the template has no system role, set "
            "data.system_prompt=null."
        ]
    ids = renderer.encode(texts)
    answer_ids, rejected_ids = [[list[int]() for _ in texts] for _ in range(2)]
    if answers is not None:
        answer_ids = answers.encode(ids, turns)
        rejected_ids = answers.encode(ids, worse) if worse else rejected_ids
    return [
        Prompt(
            prompt_id=first_id + index,
            token_ids=ids[index],
            text=texts[index],
            question=problem.question,
            example=problem.example,
            tags=problem.tags,
            dataset=data.name,
            difficulty=problem.difficulty,
            where=problem.where,
            answer_ids=answer_ids[index],
            messages=asked[index],
            has_answer=bool(problem.answer),
            rejected_ids=rejected_ids[index],
            is_desired=problem.is_desired,
        )
        for index, problem in enumerate(problems)
    ], []


def _with_images(
    prompts: list[Prompt], processor: ImageProcessor
) -> tuple[list[Prompt], list[str]]:
    """Return prompts with their images, if they have any, and messages for a ConfigError."""
    seen, faults = list[Prompt](), list[str]()
    of_prompts = [images_in(prompt.messages) for prompt in prompts]
    processor.learn({image.size for files in of_prompts for image in files})
    for prompt, files in zip(prompts, of_prompts, strict=True):
        try:
            ids, tokens = processor.expanded(prompt.token_ids, files)
        except ValueError as fault:
            faults.append(f"{prompt.where}: {fault}")
            continue
        images = PromptFiles(files, tokens, processor) if files else None
        seen.append(replace(prompt, token_ids=ids, images=images))
    if not faults:
        return seen, []
    return [], [
        f"{len(faults)} of {len(prompts)} prompts cannot be read by the model's image processor.\n"
        f"{first_faults(faults)}\nCorrect these rows, or leave them out."
    ]


def _with_placeholders(model: ModelConfig, prompts: Sequence[Prompt]) -> list[str]:
    """Report texts with tokens that stand for images, of which there are none."""
    banned = set(placeholder_ids(read_model_config(model.path)))
    faults = [
        f"{prompt.where}: {name}"
        for prompt in prompts
        for name, ids in (
            ("its prompt", [] if prompt.images else prompt.token_ids),
            ("its response", [*prompt.answer_ids, *prompt.rejected_ids]),
        )
        if not banned.isdisjoint(ids)
    ]
    if not faults:
        return []
    return [
        f"{len(faults)} texts have a token of the model that stands for images, and no image:\n"
        f"{first_faults(faults)}\nRemove it from these texts."
    ]


def _keep_short(
    data: DataSet,
    train: list[Prompt],
    held_out: list[Prompt],
    max_prompt_tokens: int,
    max_answer_tokens: int | None,
    kept: PromptSets,
) -> list[str]:
    """Add a data set's prompts within the limits to `kept`, with its summary; return faults."""
    faults: list[str] = []
    if max_answer_tokens is not None:
        faults += _too_long(train, data.config, max_answer_tokens, answers=True)
        short = [prompt for prompt in train if prompt.longest_answer <= max_answer_tokens]
        reason = f"with an answer longer than {max_answer_tokens} tokens"
        data.left_out[reason] = len(train) - len(short)
        train = short
    for half in (train, held_out):
        faults += _too_long(half, data.config, max_prompt_tokens)
    trained, evaluated = (
        [prompt for prompt in half if len(prompt.token_ids) <= max_prompt_tokens]
        for half in (train, held_out)
    )
    reason = f"longer than {max_prompt_tokens} tokens"
    data.left_out[reason] = len(train) - len(trained)
    kept.train.extend(trained)
    kept.held_out.extend(evaluated)
    kept.data_sets.append(
        DataSetSummary(
            name=data.name,
            source=data.source,
            share=data.share,
            train=len(trained),
            held_out=len(evaluated),
            left_out=data.left_out,
            held_out_left_out={reason: len(held_out) - len(evaluated)},
        )
    )
    return faults


def _unused_system_prompts(config: DataConfig, sets: dict[str, DataSet]) -> list[str]:
    """Report system prompts that no problem uses: a data set's own, or the shared one."""
    sharing: dict[str, list[Problem]] = {}
    for name, each in sets.items():
        has_own = name and config.mixture[name].system_prompt is not None
        sharing.setdefault(name if has_own else "", []).extend(each.train + each.held_out)
    faults: list[str] = []
    for name, problems in sharing.items():
        used = sets[name].config if name else config
        if used.system_prompt is None or any(isinstance(p.prompt, str) for p in problems):
            continue
        text = (
            f"data.system_prompt = {used.system_prompt!r} has no effect: data.prompt_key = "
            f"{used.prompt_key} holds lists of chat messages, which are read as they are.\n"
            "Set data.system_prompt=null, or put it into the messages."
        )
        faults.append(sets[name].with_own_keys(text) if name else text)
    return faults


def _too_few(summary: DataSetSummary, data: DataSet, limit: int) -> list[str]:
    """Check that enough prompts are left after dropping too long ones."""
    faults = data.too_few(summary.train)
    if not summary.held_out:
        of_set = f" of data.mixture.{data.name}" if data.name else ""
        faults.append(
            f"data.too_long_prompts = drop leaves no held-out prompt{of_set} of at most "
            f"rollout.max_prompt_tokens = {limit} tokens.\nRaise rollout.max_prompt_tokens."
        )
    return faults


def _notes(summary: DataSetSummary, data: DataSet) -> list[str]:
    """Return remarks on a data set's split and left-out problems."""
    notes = [data.with_own_keys(note) for note in data.notes]
    halves = {"training": summary.left_out, "held-out": summary.held_out_left_out}
    for half, left_out in halves.items():
        if text := left_out_text(left_out):
            notes.append(f"{half} problems left out: {text}")
    return [f"{data.name}: {note}" if data.name else note for note in notes]


def _too_long(
    prompts: Sequence[Prompt], config: DataConfig, limit: int, *, answers: bool = False
) -> list[str]:
    """Report prompts, or their reference answers, of more than `limit` tokens, unless dropped."""
    lengths = [(p.longest_answer if answers else len(p.token_ids), p.where) for p in prompts]
    longer = [(length, where) for length, where in lengths if length > limit]
    if not longer or config.too_long_prompts is TooLongPrompts.drop:
        return []
    key, what, few_shot = "rollout.max_prompt_tokens", "prompts", ""
    if answers:
        key, what = "rollout.max_response_tokens", "reference answers"
    elif config.few_shot:
        few_shot = f" with the {config.few_shot} examples of data.few_shot"
    listed = first_faults([f"{where}: {length} tokens" for length, where in longer])
    return [
        f"{key} = {limit}, but {len(longer)} of {len(prompts)} {what} are longer{few_shot}.\n"
        f"{listed}\n"
        f"Set {key}={max(longer)[0]}, or drop these problems: data.too_long_prompts=drop"
    ]


def _without_embedding(
    model: ModelConfig, tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Prompt]
) -> list[str]:
    """Report tokens that were added to the tokenizer and not to the model, answers' as well."""
    size = text_part(read_model_config(model.path)).get("vocab_size")
    if type(size) is not int:
        return []
    largest = [
        (max(p.token_ids + p.answer_ids + p.rejected_ids, default=0), p.where) for p in prompts
    ]
    lacking = [(token, where) for token, where in largest if token >= size]
    if not lacking:
        return []
    token, where = lacking[0]
    return [
        f"model.path = {model.path}: {len(lacking)} of {len(prompts)} problems have tokens that "
        f"the tokenizer has and the model lacks, such as {token} "
        f"({tokenizer.convert_ids_to_tokens(token)}) in {where}: config.json has vocab_size = "
        f"{size}.\n"
        f"Save the model with resized embeddings (resize_token_embeddings), or take the tokenizer "
        f"and chat template that belong to it."
    ]


def _note_unknown_tokens(kept: PromptSets, prompts: list[Prompt], renderer: Renderer) -> None:
    """Note the share of a data set's unknown tokens, if it is the largest so far."""
    unknown = [prompt.token_ids.count(renderer.unknown_id) for prompt in prompts]
    share = sum(unknown) / max(1, sum(len(prompt.token_ids) for prompt in prompts))
    if share >= (kept.measures.get("data/unknown_fraction") or 0.0):
        worst = prompts[unknown.index(max(unknown))]
        kept.measures["data/unknown_fraction"] = share
        kept.details["unknown_tokens"] = lambda: (
            f"{' '.join(renderer.unknown_texts(worst.text))} in {worst.where}"
        )
