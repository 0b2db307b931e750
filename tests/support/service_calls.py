"""Programs that call a service: python -m tests.support.service_calls <name> <folder>."""

import sys
import time
from pathlib import Path

import pytest
import torch

from hybridrl import AdamParams, Datum, Sampling, Service, ServiceError

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]
DATA = [
    Datum(TOKENS[:-1], TOKENS[1:], {"weights": [1.0] * 7}),
    Datum(TOKENS[2:-1], TOKENS[3:], {"weights": [0.0, 0.0, 1.0, 1.0, 0.5]}),
    # Targets that are not the next tokens, as of a prompt that is not trained.
    Datum(TOKENS[2:-1], [0, 0, 10, 11, 12], {"weights": [0.0, 0.0, 1.0, 1.0, 0.5]}),
]
STEP = AdamParams(learning_rate=1e-2)
ANSWER = Sampling(max_tokens=16, seed=1)


def service(folder: Path, *overrides: str) -> Service:
    return Service(["hardware=cpu", "cluster.gpus_per_node=2", *overrides], folder=folder)


def train(one: Service, steps: int, model: str = "model-1") -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(one.forward_backward(DATA, model=model).result().metrics["loss:sum"])
        one.optim_step(STEP, model=model)
    return losses


def gradient(one: Service, data: list[Datum], loss: object, **settings: float) -> float:
    """The norm of a loss's gradient; the weights stay."""
    one.forward_backward(data, loss, settings).result()
    return one.optim_step(AdamParams(learning_rate=0.0)).result()["grad_norm"]


def adapters(folder: Path) -> None:
    """Everything, with adapters, on two ranks."""
    with service(folder, "lora=default") as one:
        before = one.forward(DATA).result().log_probs
        # Of other targets the log-probs are other ones; of the same they are the same.
        assert before[1][2:] == pytest.approx(before[2][2:], abs=1e-6)
        assert before[1][0] != pytest.approx(before[2][0], abs=1e-3)
        assert one.log_probs(TOKENS).result() == pytest.approx(before[0], abs=1e-6)
        losses = train(one, 3)
        expected = -sum(before[0]) - sum(r[2] + r[3] + r[4] / 2 for r in before[1:])
        assert losses[0] == pytest.approx(expected, rel=1e-5) and losses[0] > losses[-1]
        samples_are_those_of_their_weights(one)
        gradients_of_losses(one)
        models_are_apart(one, before)
        for call, text in faults(one):
            with pytest.raises(ServiceError, match=text):
                call()
        state(one)
        names_are_kept_in_the_order_of_their_use(one)
        late = one.sample(TOKENS[:3], 64, Sampling(max_tokens=200))
    assert isinstance(late.exception(timeout=5), ServiceError)  # closed meanwhile
    with service(folder, "lora=default") as one:  # another process would find it as well
        one.load_state("first").result()
        assert one.states() == ["first"]
        assert one.forward(DATA).result().log_probs != before


def samples_are_those_of_their_weights(one: Service) -> None:
    earlier = one.weights_for_sampling().result()
    first = one.sample(TOKENS[:3], 2, ANSWER, weights=earlier).result()
    train(one, 2)
    start = time.perf_counter()
    later = one.weights_for_sampling().result()
    print("weights_for_sampling", time.perf_counter() - start, "s")
    assert later != earlier
    # Calls that wait together, some of them to the same weights.
    calls = [one.sample(TOKENS[:3], 2, ANSWER, weights=w) for w in (later, later, earlier)]
    second, same, again = (call.result() for call in calls)
    tokens = [[one.tokens for one in samples] for samples in (first, again, second, same)]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]
    for weights, samples in ((earlier, first), (later, second)):
        for tokens, log_probs, _ in samples:
            own = one.log_probs(TOKENS[:3] + tokens, weights=weights).result()[2:]
            assert own == pytest.approx(log_probs, abs=1e-5)
    # An answer ends with the first of the texts or tokens.
    tokens = second[0].tokens
    cut = one.sample(TOKENS[:3], 1, ANSWER._replace(stop=(tokens[4],)), weights=later).result()[0]
    assert cut.tokens == tokens[: tokens.index(tokens[4]) + 1] and cut.stop_reason == "stop"
    decode = one.tokenizer.decode
    text = decode(tokens[3:6])
    cut = one.sample(TOKENS[:3], 1, ANSWER._replace(stop=(text,)), weights=later).result()[0]
    assert text in decode(cut.tokens) and text not in decode(cut.tokens[:-1])
    expected = second[0].log_probs[: len(cut.tokens)]
    assert cut.log_probs == pytest.approx(expected, abs=1e-5)


def gradients_of_losses(one: Service) -> None:
    log_probs = one.forward(DATA).result().log_probs
    weights = [datum.inputs["weights"] for datum in DATA]

    def custom(
        data: list[Datum], rows: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        parts = [(torch.tensor(w) * row).sum() for w, row in zip(weights, rows, strict=True)]
        return -sum(parts), {"own": 1.0}

    built_in = gradient(one, DATA, "cross_entropy")
    assert gradient(one, DATA, custom) == pytest.approx(built_in, rel=1e-5)
    on_policy = [
        Datum(datum.tokens, datum.targets, {"logprobs": old, "advantages": weight})
        for datum, old, weight in zip(DATA, log_probs, weights, strict=True)
    ]
    # Where the ratio is 1, these gradients are those of the weighted log-probs.
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        norm = gradient(one, on_policy, loss)
        assert norm == pytest.approx(built_in, rel=1e-4), loss
    # Two calls add up to one.
    one.forward_backward(DATA[:1])
    assert gradient(one, DATA[1:], "cross_entropy") == pytest.approx(built_in, rel=1e-5)


def models_are_apart(one: Service, before: list[list[float]]) -> None:
    trained = one.forward(DATA).result().log_probs
    one.forward_backward(DATA)  # its gradient waits meanwhile
    other = one.create_model().result()
    assert one.forward(DATA, model=other).result().log_probs == before
    assert one.forward(DATA).result().log_probs == trained
    train(one, 1, other)
    one.optim_step(AdamParams(learning_rate=0.0)).result()
    assert one.forward(DATA).result().log_probs == trained
    one.delete_model(other).result()


def state(one: Service) -> None:
    one.save_state("first").result()
    trained = one.forward(DATA).result().log_probs
    after = train(one, 2)
    one.forward_backward(DATA)  # its gradient is dropped
    one.load_state("first").result()
    assert one.forward(DATA).result().log_probs == trained
    assert train(one, 2) == after  # with its moments
    weights = one.weights_of_state("first").result()
    assert one.log_probs(TOKENS, weights=weights).result() == pytest.approx(trained[0], abs=1e-6)
    # Another state of the same name has other weights.
    one.delete_state("first").result()
    one.save_state("first").result()
    other = one.weights_of_state("first").result()
    now = one.forward(DATA).result().log_probs[0]
    assert one.log_probs(TOKENS, weights=other).result() == pytest.approx(now, abs=1e-6)
    assert one.log_probs(TOKENS, weights=weights).result() == pytest.approx(trained[0], abs=1e-6)


def names_are_kept_in_the_order_of_their_use(one: Service) -> None:
    first = one.weights_for_sampling().result()
    other = one.create_model().result()
    later = []
    for _ in range(7):
        train(one, 1, other)
        later.append(one.weights_for_sampling(model=other).result())
    assert one.weights_for_sampling().result() == first  # now the last of eight
    train(one, 1, other)
    one.weights_for_sampling(model=other).result()
    one.log_probs(TOKENS, weights=first).result()
    with pytest.raises(ServiceError, match="only the last 8 are kept"):
        one.log_probs(TOKENS, weights=later[0]).result()
    one.delete_model(other).result()


def faults(one: Service) -> list[tuple]:
    wrong = Datum([1, 2], [2, 3], {"weights": [1.0]})
    return [
        (lambda: one.sample([], 1, ANSWER), "datum 0 has 0 tokens, expected 1 to"),
        (lambda: one.sample([1], 1, ANSWER._replace(top_p=0.0)), "top_p = 0.0"),
        (lambda: one.sample([1], 1, ANSWER._replace(temperature=3.0)), "temperature = 3.0"),
        (lambda: one.forward_backward(DATA, "other"), "loss other: expected one of cross_entropy"),
        (lambda: one.forward_backward(DATA, "ppo"), "datum 0 has weights: the loss takes logprobs"),
        (lambda: one.forward_backward([wrong]), "1 weights for 2 tokens"),
        (lambda: one.forward([Datum([1], [10**6], {})]), "outside of 0 to"),
        (lambda: one.optim_step(STEP).result(), "there is no gradient"),
        (lambda: one.forward(DATA, model="x").result(), "model x: there is no such model"),
        (lambda: one.sample([1], 1, ANSWER, weights="x").result(), "the weights x are gone"),
        (lambda: one.load_state("x").result(), "state x: expected one of none"),
        (lambda: one.save_state("../x"), "expected letters"),
        (lambda: one.forward_backward(DATA, lambda *_: 1 / 0).result(), "ZeroDivisionError"),
        (lambda: one.forward_backward(DATA, no_metrics).result(), "TypeError"),
    ]


def no_metrics(data: list[Datum], rows: list[torch.Tensor]) -> tuple[torch.Tensor, None]:
    return rows[0].sum(), None


def whole(folder: Path) -> None:
    """Training of all weights: one model, whose earlier weights are gone."""
    with service(folder) as one:
        losses = train(one, 1)  # after more, float32 alone makes differences of 1e-5
        earlier = one.weights_for_sampling().result()
        samples = one.sample(TOKENS[:3], 2, ANSWER, weights=earlier).result()
        own = one.log_probs(TOKENS[:3] + samples[0].tokens, weights=earlier).result()[2:]
        assert own == pytest.approx(samples[0].log_probs, abs=1e-5)
        losses += train(one, 2)
        assert losses[-1] < losses[0]
        with pytest.raises(ServiceError, match="they have changed since"):
            one.sample(TOKENS[:3], 2, ANSWER, weights=earlier).result()
        with pytest.raises(ServiceError, match="there is one model"):
            one.create_model().result()


if __name__ == "__main__":
    programs = {"adapters": adapters, "whole": whole}
    programs[sys.argv[1]](Path(sys.argv[2]))
    print("all is as expected")
