"""A training loop of your own, by primitives: sample, judge, gradients, optimizer step.

python examples/own_loop.py                              ten steps of GRPO, a minute on two cores
"""

import random
import sys

from hybridrl import AdamParams, Datum, Sampling, Service
from hybridrl.service.data import Sample

PROMPTS, SAMPLES = 16, 8


def problems() -> list[tuple[str, str]]:
    """Draw sums, each with its answer."""
    pairs = [(random.randint(2, 49), random.randint(2, 49)) for _ in range(PROMPTS)]
    text = "Tom has {} apples and finds {}. How many apples does Tom have now?"
    return [(text.format(*pair), str(sum(pair))) for pair in pairs]


def main() -> None:
    """Train; arguments are overrides of the config, such as model.path=... or lora=default."""
    with Service(["hardware=cpu", *sys.argv[1:]], folder="runs/own_loop") as service:
        tokenizer, chat = service.tokenizer, {"add_generation_prompt": True, "return_dict": False}
        for step in range(10):
            tasks, weights = problems(), service.weights_for_sampling().result()
            chats = [[{"role": "user", "content": question}] for question, _ in tasks]
            prompts = [tokenizer.apply_chat_template(one, **chat) for one in chats]
            sampling = Sampling(max_tokens=64)
            # All calls wait together, and are sampled together.
            calls = [service.sample(p, SAMPLES, sampling, weights=weights) for p in prompts]
            data, rewards = [], []
            for prompt, call, (_, answer) in zip(prompts, calls, tasks, strict=True):
                samples = call.result()
                texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in samples]
                own = [float(text.split()[-1:] == [answer]) for text in texts]
                rewards += own
                for one, reward in zip(samples, own, strict=True):
                    data.append(_datum(prompt, one, reward - sum(own) / SAMPLES))
            service.forward_backward(data, "importance_sampling")
            norm = service.optim_step(AdamParams(learning_rate=3e-4)).result()["grad_norm"]
            mean = sum(rewards) / len(rewards)
            print(f"step {step + 1}: mean reward {mean:.3f}, gradient norm {norm:.2f}", flush=True)
        print("saved in", service.save_state("last").result())


def _datum(prompt: list[int], sample: Sample, advantage: float) -> Datum:
    """Return what a sample is trained on: position i reads token i and predicts the next."""
    tokens, before = [*prompt, *sample.tokens], [0.0] * (len(prompt) - 1)
    advantages = before + [advantage] * len(sample.tokens)
    inputs = {"logprobs": before + sample.log_probs, "advantages": advantages}
    return Datum(tokens[:-1], tokens[1:], inputs)


if __name__ == "__main__":
    main()
