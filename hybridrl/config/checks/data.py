"""Checks of conf/data: keys that fit together, and files on disk, whose contents are not read."""

import os
import re
import stat
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from hybridrl.config.choices import Targets
from hybridrl.config.command.input_errors import expanded, is_address, reason_of
from hybridrl.config.errors import ABSENT, Problem, raised_problems
from hybridrl.config.estimators import is_supervised, trains_on_answers
from hybridrl.config.policy_losses import targets_of
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.classes import function_at
from hybridrl.config.user_code.importing import check_import, check_itself

DATA_SUFFIXES = (".jsonl", ".parquet")
# Parameters of apply_chat_template that are not a template's own.
RESERVED = {
    *("self", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
# Names are part of metrics and config keys.
_NAME = re.compile(r"[A-Za-z]\w*")


def source_problems(config: RunConfig) -> Iterator[tuple[str, Iterator[Problem]]]:
    """Yield the keys of sources, which are not read if they have problems, with the problems."""
    yield "data.function", _function_problems(config)
    yield "data.mixture", mixture_problems(config)
    for key in ("data.train_files", "data.eval_files"):
        yield key, _files_at(config, key)


def _function_problems(config: RunConfig) -> Iterator[Problem]:
    """Check the function and that there is no other source of problems."""
    data, path = config.data, config.data.function
    if path is not None:
        for name in ("train_files", "eval_files", "mixture"):
            if value := vars(data)[name]:
                why = f"data.function = {path} returns the problems"
                remedy = f"Remove data.{name}, or set data.function=null"
                yield Problem("two_sources", f"data.{name}", value, "null", why, remedy)
        yield from raised_problems(_check_function, path, data.args)


def _check_function(path: str, args: dict[str, Any]) -> None:
    check_import("data.function", path)
    check_itself("data", path, function_at("data", path), args)


def _files_at(config: RunConfig, key: str) -> Iterator[Problem]:
    yield from file_problems(key, attrgetter(key)(config))


def reference_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that data sets have worked solutions or answers, if prompts or training show them."""
    data, key = config.data, "data.solution_key"
    why = f"data.few_shot = {data.few_shot} shows" if data.few_shot else ""
    if trains_on_answers(config) and targets_of(config) is Targets.answers:
        why = "algorithm=sft" if is_supervised(config) else "teacher.given_fraction"
        why += " trains on"
    if not why or data.answer_key or data.solution_key:
        return
    lacking = [
        f" of data.mixture.{name}"
        for name, part in data.mixture.items()
        if not (part.answer_key or part.solution_key)
    ]
    for where in lacking or [""] * (not data.mixture):
        shows = f"{why} worked solutions, and data.answer_key{where} is null, too"
        remedy = f"Set {key}=<column of the solution>"
        yield Problem("no_solutions", key, None, "a column", shows, remedy)


def template_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that data.chat_template_kwargs are a template's own."""
    for name in sorted(RESERVED & config.data.chat_template_kwargs.keys()):
        key, why = f"data.chat_template_kwargs.{name}", "it is no argument of a chat template; "
        why += "hybridrl sets it"
        yield Problem("template_argument", key, ABSENT, "", why, f"Remove it: '~{key}'")


def mixture_problems(config: RunConfig) -> Iterator[Problem]:
    """Check names, weights and sources of the data sets of data.mixture."""
    seen: dict[str, str] = {}
    for name, part in config.data.mixture.items():
        key = f"data.mixture.{name}"
        if not _NAME.fullmatch(name):
            expected = "a name of letters, digits and _, beginning with a letter"
            why = "it is part of metrics (reward/mean_<name>)"
            yield Problem("mixture_name", key, ABSENT, expected, why, "Rename it")
        if (part.name is None) == (part.train_files is None):
            expected = f"one of name and train_files, not {'both' if part.name else 'neither'}"
            why, remedy = "they are the source of the problems", f"{key}.name or {key}.train_files"
            yield Problem("mixture_source", key, ABSENT, expected, why, f"Set {remedy}")
        yield from file_problems(f"{key}.train_files", part.train_files)
        yield from file_problems(f"{key}.eval_files", part.eval_files)
        source = f"{part.name} {part.train_files}"
        if source in seen:
            why = f"{seen[source]} reads the same problems ({part.train_files or part.name})"
            remedy = "Remove one and add its weight to the other"
            yield Problem("mixture_twice", key, ABSENT, "", why, remedy)
        seen[source] = key


def file_problems(key: str, value: Any) -> Iterator[Problem]:
    """Check that the files of a path, a list of paths or None can be read."""
    paths = value if isinstance(value, list) else [value]
    if value is not None and not (paths and all(isinstance(p, str) and p for p in paths)):
        expected = "a path or a list of paths such as [a.jsonl,b.jsonl]"
        yield Problem("data_paths", key, value, expected)
    elif value is not None:
        for path in paths:
            if problem := _file_problem(path):
                expected, why, remedy = problem
                yield Problem("data_file", key, path, expected, why, remedy)


def _file_problem(path: str) -> tuple[str, str, str] | None:
    """Return what is expected instead of a file, why, and the remedy; None if it can be read."""
    if is_address(path):
        why, remedy = "this is an address on the network", "Download it, and set the copy's path"
        return "a local file", why, remedy
    file = expanded(path)
    try:
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "", f"there is no such file (seen from {Path.cwd()})", ""
    except (OSError, ValueError) as error:
        return "", f"it cannot be read: {reason_of(error)}", ""
    if stat.S_ISDIR(mode):
        return "a file", "this is a folder", "Set the paths of its .jsonl or .parquet files"
    if not stat.S_ISREG(mode):
        return "a regular file", "this is a device or a pipe, and it is read more than once", ""
    if file.suffix not in DATA_SUFFIXES:
        return "a file that ends in .jsonl or .parquet", "", ""
    return None if os.access(file, os.R_OK) else ("", "it cannot be read: Permission denied", "")
