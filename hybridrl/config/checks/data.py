"""Checks of conf/data that do not read the files."""

import re
from collections.abc import Iterator

from hybridrl.config.checks.resources import file_problems
from hybridrl.config.estimators import is_supervised
from hybridrl.config.schema import RunConfig

# Parameters of apply_chat_template that are not a template's own.
RESERVED = {
    *("self", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
# Names are part of metrics and config keys.
_NAME = re.compile(r"[A-Za-z]\w*")


def source_problems(config: RunConfig) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield the keys of sources, which are not read if they have problems, with the problems."""
    data = vars(config.data)
    yield "data.mixture", mixture_problems(config)
    for name in ("train_files", "eval_files"):
        if name in data:
            yield f"data.{name}", file_problems(f"data.{name}", data[name])


def reference_problems(config: RunConfig) -> Iterator[str]:
    """Check that data sets have worked solutions or answers, if prompts or training show them."""
    data = config.data
    why = f"data.few_shot = {data.few_shot} shows" if data.few_shot else ""
    if is_supervised(config):
        why = "algorithm=sft trains on"
    shared = data.answer_key or data.solution_key
    lacking = [
        f" of data.mixture.{name}"
        for name, part in data.mixture.items()
        if not (part.answer_key or part.solution_key)
    ]
    for where in lacking or [""] * (not data.mixture):
        if why and not shared:
            yield (
                f"{why} worked solutions, but data.answer_key and data.solution_key{where} are "
                f"null.\nSet data.solution_key=<column of the solution>."
            )


def template_problems(config: RunConfig) -> Iterator[str]:
    """Check that data.chat_template_kwargs are a template's own."""
    for name in sorted(RESERVED & config.data.chat_template_kwargs.keys()):
        yield (
            f"data.chat_template_kwargs.{name}: it is no argument of a chat template; hybridrl "
            f"sets it.\nRemove it: '~data.chat_template_kwargs.{name}'"
        )


def mixture_problems(config: RunConfig) -> Iterator[str]:
    """Check names, weights and sources of the data sets of data.mixture."""
    seen: dict[str, str] = {}
    for name, part in config.data.mixture.items():
        key = f"data.mixture.{name}"
        if not _NAME.fullmatch(name):
            yield (
                f"{key}: the name {name} is not allowed, expected letters, digits and _, beginning "
                f"with a letter: it is part of metrics (reward/mean_<name>).\nRename it."
            )
        if (part.name is None) == (part.train_files is None):
            found = "neither" if part.name is None else "both"
            yield (
                f"{key} has {found} of name and train_files, expected one: they are the source of "
                f"the training problems.\nSet {key}.name or {key}.train_files."
            )
        yield from file_problems(f"{key}.train_files", part.train_files)
        yield from file_problems(f"{key}.eval_files", part.eval_files)
        source = f"{part.name} {part.train_files}"
        if source in seen:
            yield (
                f"{key} and {seen[source]} read the same training problems "
                f"({part.train_files or part.name}).\nRemove one and add its weight to the other."
            )
        seen[source] = key
