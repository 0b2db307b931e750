"""Solved examples before a question: chat turns or plain text, never trained on, never held out."""

from dataclasses import replace

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.problem_sets import choose_examples, load_problem_sets, question_of
from hybridrl.data.sources.problems import train_problems
from hybridrl.data.sources.prompts import examine_prompts, load_prompts
from hybridrl.data.sources.rows import Problem, with_examples
from hybridrl.data.sources.tokenizer import load_tokenizer
from tests.support.data_configs import data_config, jsonl, sums
from tests.support.role_configs import model_config
from tests.support.tokenizer_folders import model_folder


def solved(prompt, answer: str = "", solution: str = "") -> Problem:
    return Problem(prompt, answer, {}, {}, "here", solution)


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


@pytest.fixture
def config(tmp_path):
    """Ten problems to train on and two held out, two examples shown."""
    path = jsonl(tmp_path / "a.jsonl", sums(range(12)))
    return data_config(train_files=str(path), num_eval_problems=2, few_shot=2)


def test_examples_are_turns_between_the_system_and_the_question():
    question = [message("system", "Think."), message("user", "2 + 2?")]
    shown = [solved("1 + 1?", "#### 2"), solved("1 + 2?", "3", "One more than 2. #### 3")]
    assert with_examples(question, shown) == [
        message("system", "Think."),
        message("user", "1 + 1?"),
        message("assistant", "#### 2"),
        message("user", "1 + 2?"),
        message("assistant", "One more than 2. #### 3"),
        message("user", "2 + 2?"),
    ]
    assert with_examples(question, []) == question


def test_examples_of_chat_messages_leave_their_system_message_out():
    turns = [message("user", "1 + 1?"), message("assistant", "?"), message("user", "Go on.")]
    shown = [solved([message("system", "Be brief."), *turns], "#### 2")]
    assert with_examples([message("user", "2 + 2?")], shown) == [
        *turns,
        message("assistant", "#### 2"),
        message("user", "2 + 2?"),
    ]


def test_examples_are_the_same_in_every_run_and_never_held_out():
    problems = [solved(f"{i} + 1?") for i in range(30)]
    held_out = {question_of(problem) for problem in problems[10:]}
    chosen = choose_examples(problems, held_out, 5)
    assert chosen == choose_examples(problems, held_out, 5)
    assert {p.prompt for p in chosen} <= {p.prompt for p in problems[:10]}
    assert len({p.prompt for p in chosen}) == 5
    assert len(choose_examples(problems + problems, held_out, 50)) == 10


def test_shown_problems_are_not_trained_on(config):
    sets = load_problem_sets(config)[""]
    shown = {question_of(example) for example in sets.examples}
    assert len(shown) == 2
    assert len(sets.train) == 8
    assert not shown & {question_of(problem) for problem in sets.train + sets.held_out}
    assert sets.left_out == {"shown as examples": 2}


def test_the_embedded_model_reads_examples_as_chat_turns(config, tmp_path):
    rows = [{"question": p["question"], "answer": p["answer"]} for p in train_problems(12)]
    config.train_files = str(jsonl(tmp_path / "embedded.jsonl", rows))
    prompts = load_prompts(config, model_config("embedded"), 400)
    first, second = load_problem_sets(config)[""].examples
    shown = "".join(
        f"<|user|>{example.question}<|assistant|>{example.answer}<|end|>"
        for example in (first, second)
    )
    tokenizer = load_tokenizer(model_config("embedded"))
    for prompt in prompts.train + prompts.held_out:
        assert prompt.text == f"{shown}<|user|>{prompt.question}<|assistant|>"
        assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text


def test_without_a_chat_template_examples_are_plain_text(config, tmp_path):
    texts = [text for row in sums(range(12)) for text in (row["question"], row["answer"])]
    model = model_config(model_folder(tmp_path / "plain", [*texts, "Think."], template=None))
    prompts = load_prompts(replace(config, system_prompt="Think."), model, 100)
    first, second = load_problem_sets(config)[""].examples
    assert prompts.train[0].text == (
        f"Think.\n\n{first.question}\n{first.answer}\n\n{second.question}\n{second.answer}\n\n"
        f"{prompts.train[0].question}\n"
    )


def test_the_solution_column_is_shown_and_the_answer_column_is_judged(tmp_path):
    rows = [
        {"prompt": row["question"], "gold": {"answer": str(i)}, "worked": f"Count on. {i}"}
        for i, row in enumerate(sums(range(9)))
    ]
    config = data_config(
        train_files=str(jsonl(tmp_path / "a.jsonl", rows)),
        prompt_key="prompt",
        answer_key="gold.answer",
        solution_key="worked",
        num_eval_problems=2,
        few_shot=1,
    )
    sets = load_problem_sets(config)[""]
    (example,) = sets.examples
    assert example.solution == f"Count on. {example.answer}"
    assert sets.train[0].example["answer"] == sets.train[0].answer
    with pytest.raises(ConfigError, match=r"data\.solution_key = steps"):
        load_problem_sets(replace(config, solution_key="steps"))
    # Nothing else reads the column.
    load_problem_sets(replace(config, solution_key="steps", few_shot=0))


def test_the_length_limit_counts_the_examples(config):
    without = load_prompts(replace(config, few_shot=0), model_config("embedded"), 100)
    longest = max(len(prompt.token_ids) for prompt in without.train)
    (train, held_out) = examine_prompts(config, model_config("embedded"), longest)[1]
    assert "8 of 8 prompts are longer with the 2 examples of data.few_shot" in train
    assert "2 of 2 prompts are longer" in held_out


def test_more_examples_than_problems_are_refused(config):
    with pytest.raises(ConfigError, match=r"data\.few_shot = 20, but the data set has 10 "):
        load_problem_sets(replace(config, few_shot=20))
