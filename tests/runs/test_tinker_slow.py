"""`hybridrl tinker` with tinker's SDK and its cookbook, over the embedded model."""

import json
import math
import signal
import subprocess
import sys
import time
import warnings
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.models.resolve import EMBEDDED_FOLDER
from tests.support.tinker_serving import (
    COOKBOOK_NAME,
    KEY,
    run_recipe,
    served,
    write_cookbook_folder,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
tinker = pytest.importorskip("tinker", reason="pip install 'hybridrl[tinker]'")

TEXTS = ["3 + 4? The answer is 7.", "Tom has 2 apples and buys 3.", "#### 12"]
STEP = {"learning_rate": 1e-3}
# A client that trains one step, saves, and is killed while it waits for a second.
KILLED = """
import sys, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
model = service.create_lora_training_client("embedded", rank=8).result()
ids = [5, 6, 7, 8]
data = [tinker.Datum(
    model_input=tinker.ModelInput.from_ints(ids[:-1]),
    loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * 3},
)]
model.forward_backward(data, "cross_entropy").result()
model.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
print(model.save_state("kept").result().path, flush=True)
while True:
    model.forward_backward(data, "cross_entropy").result()
"""


def connected(url: str) -> Any:
    warnings.simplefilter("ignore", FutureWarning)
    return tinker.ServiceClient(base_url=url, api_key=KEY)


def data_of(model: Any) -> list[Any]:
    tokenizer = model.get_tokenizer()
    rows = [tokenizer.encode(text) for text in TEXTS]
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
        )
        for ids in rows
    ]


def log_probs(model: Any, data: list[Any]) -> list[torch.Tensor]:
    outputs = model.forward(data, "cross_entropy").result().loss_fn_outputs
    return [torch.tensor(one["logprobs"].tolist()) for one in outputs]


def by_transformers(data: list[Any]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.float32)
    rows = []
    with torch.no_grad():
        for datum in data:
            ids = torch.tensor([datum.model_input.to_ints()])
            targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].tolist())
            rows.append(model(ids).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return rows


def stepped(model: Any, data: list[Any], loss: Any = "cross_entropy") -> None:
    if isinstance(loss, str):
        model.forward_backward(data, loss)
    else:
        model.forward_backward_custom(data, loss)
    model.optim_step(tinker.AdamParams(**STEP)).result()


def is_close(rows: list[torch.Tensor], others: list[torch.Tensor], within: float = 1e-5) -> bool:
    return all((a - b).abs().max() < within for a, b in zip(rows, others, strict=True))


def test_the_sdk_trains_samples_and_saves(tmp_path):
    with served(tmp_path / "states", "embedded", "lora.rank=8") as server:
        client = connected(server.url)
        model = client.create_lora_training_client("embedded", rank=8).result()
        data = data_of(model)
        before = log_probs(model, data)
        assert is_close(before, by_transformers(data))

        base = client.create_sampling_client(base_model="embedded").result()
        ids = [*data[0].model_input.to_ints(), data[0].loss_fn_inputs["target_tokens"].tolist()[-1]]
        whole = tinker.ModelInput.from_ints(ids)
        known = base.compute_logprobs(whole).result()
        assert known[0] is None and is_close([torch.tensor(known[1:])], before[:1])

        # A step by the built-in loss, and the same by a function of log-probs.
        own = client.create_lora_training_client("embedded", rank=8).result()

        def negative(data, rows):
            return -sum(row.sum() for row in rows), {}

        stepped(model, data)
        stepped(own, data, negative)
        after = log_probs(model, data)
        assert not is_close(after, before, 1e-2)
        assert is_close(after, log_probs(own, data))

        short, one = tinker.ModelInput.from_ints([5]), tinker.SamplingParams(max_tokens=1)
        for _ in range(5):
            start = time.monotonic()
            newest = own.save_weights_and_get_sampling_client().result()
            named = time.monotonic()
            newest.sample(short, 1, one).result()
            sampled = time.monotonic()
            print(f"sampler: {named - start:.3f} s, its first token: {sampled - named:.3f} s")
            stepped(own, data)
        sampler = model.save_weights_and_get_sampling_client().result()
        assert is_close([torch.tensor(sampler.compute_logprobs(whole).result()[1:])], after[:1])
        prompt = tinker.ModelInput.from_ints(ids[:5])
        params = tinker.SamplingParams(max_tokens=12, seed=4)
        answer = sampler.sample(prompt, 3, params).result()
        again = sampler.sample(prompt, 3, params).result()
        tokens = [one.tokens for one in answer.sequences]
        assert (
            tokens == [one.tokens for one in again.sequences] and len(set(map(tuple, tokens))) > 1
        )
        assert all(len(one) == 12 or one[-1] == 1 for one in tokens)
        for one in answer.sequences:  # vLLM's log-probs are the trainer's
            row = tinker.ModelInput.from_ints(ids[:5] + one.tokens)
            computed = sampler.compute_logprobs(row, len(one.tokens)).result()[5:]
            assert one.logprobs == pytest.approx(computed, abs=1e-4)
        some = answer.sequences[0].tokens[1]
        stopped = sampler.sample(prompt, 1, tinker.SamplingParams(seed=4, stop=[some])).result()
        assert stopped.sequences[0].tokens[-1] == some
        assert stopped.sequences[0].stop_reason == "stop"

        state = model.save_state("whole").result().path
        weights = model.save_weights_for_sampler("w").result().path
        stepped(model, data)
        second = log_probs(model, data)
        killed = subprocess.Popen(
            [sys.executable, "-c", KILLED, server.url, KEY], stdout=subprocess.PIPE, text=True
        )
        assert killed.stdout is not None
        kept = killed.stdout.readline().strip()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert is_close(log_probs(model, data), second)
        server.kill()

    with served(tmp_path / "states", "embedded", "lora.rank=8") as server:
        client = connected(server.url)
        for path in (state, kept):
            client.create_training_client_from_state(path).result()
        model = client.create_training_client_from_state_with_optimizer(state).result()
        assert is_close(log_probs(model, data), after)
        stepped(model, data)
        assert is_close(log_probs(model, data), second)
        fresh = client.create_training_client_from_state(state).result()
        stepped(fresh, data)
        assert not is_close(log_probs(fresh, data), second)
        sampler = client.create_sampling_client(model_path=weights).result()
        assert is_close([torch.tensor(sampler.compute_logprobs(whole).result()[1:])], after[:1])
        client.close("success").result()


def test_loops_of_the_cookbook_learn(tmp_path):
    pytest.importorskip("tinker_cookbook", reason="pip install tinker-cookbook[math-rl]==0.6.1")
    model = write_cookbook_folder(tmp_path, conversations=32 * 100, problems=512)
    lengths = ["rollout.max_prompt_tokens=256", "rollout.max_response_tokens=32"]
    common = {"model_name": COOKBOOK_NAME, "lora_rank": 32}
    with served(tmp_path / "states", str(model), *lengths) as server:
        rows = run_recipe(
            "sl_loop",
            tmp_path,
            server.url,
            **common,
            batch_size=32,
            learning_rate=SL_RATE,
            max_steps=SL_STEPS,
            train_on_what="last_assistant_message",
            save_every=20,
        )
        loss = [row["train_mean_nll"] for row in rows]
        print("sl_loop:", [round(one, 2) for one in loss[::5]], loss[-1])
        assert loss[-1] < 0.5 * loss[0]
        last = json.loads((tmp_path / "sl_loop/checkpoints.jsonl").read_text().splitlines()[-1])
        (tmp_path / "rl_loop").mkdir()
        begun = {"name": "sl", "batch": 0, "state_path": last["state_path"]}
        (tmp_path / "rl_loop/checkpoints.jsonl").write_text(json.dumps(begun) + "\n")
        rows = run_recipe(
            "rl_loop",
            tmp_path,
            server.url,
            **common,
            batch_size=8,
            group_size=16,
            learning_rate=RL_RATE,
            max_steps=RL_STEPS,
            max_tokens=16,
            loss_fn="importance_sampling",
        )
        rewards = [row["reward/total"] for row in rows]
        print("rl_loop:", [round(one, 2) for one in rewards])
        assert all(math.isfinite(value) for row in rows for value in row.values())
        assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.3


SL_RATE, SL_STEPS = 2e-3, 40
RL_RATE, RL_STEPS = 2e-3, 12
