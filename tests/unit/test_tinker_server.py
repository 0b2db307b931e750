"""The tinker server's order, ids and refusals: the SDK, and a service that computes nothing."""

import math
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hybridrl.agents.http import HttpServer
from hybridrl.commands import tinker as command
from hybridrl.service.data import Datum, Output, Sample, ServiceError
from tests.support.role_configs import model_config

tinker = pytest.importorskip("tinker", reason="pip install 'hybridrl[tinker]'")

from hybridrl.tinker import server as served_paths  # noqa: E402
from hybridrl.tinker.clients import SILENT_S, Served, path_of, state_of  # noqa: E402
from hybridrl.tinker.protocol import Answers  # noqa: E402

KEY = "tml-mine"
FOLDER = Path("/states")
PROMPT = tinker.ModelInput.from_ints([1, 2, 3])


def now(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class Double:
    """A service that notes its calls; log-probs are -1 for each token."""

    folder, longest = FOLDER, 64

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.saved: list[str] = []
        self.broken = False

    def create_model(self) -> Future[str]:
        self.calls.append(("create",))
        return now("model-1")

    def delete_model(self, model: str) -> Future[None]:
        self.calls.append(("delete", model))
        return now(None)

    def forward(
        self, data: Sequence[Datum], loss: str, settings: Mapping[str, float], *, model: str
    ) -> Future[Output]:
        return self.forward_backward(data, loss, settings, model=model)

    def forward_backward(
        self, data: Sequence[Datum], loss: str, settings: Mapping[str, float], *, model: str
    ) -> Future[Output]:
        if self.broken:
            future: Future[Output] = Future()
            future.set_exception(RuntimeError("a rank has died"))
            return future
        if loss == "stable_reinforce":
            raise ServiceError(f"loss {loss}: there is none")
        self.calls.append((loss, [datum.tokens[0] for datum in data], dict(settings)))
        return now(Output([[-1.0] * len(d.tokens) for d in data], {"loss:sum": float(len(data))}))

    def optim_step(self, params: Any, *, model: str) -> Future[dict[str, float]]:
        self.calls.append(("step", params))
        return now({"norm": 2.0, "worst": math.inf})

    def weights_for_sampling(self, *, model: str) -> Future[str]:
        self.calls.append(("name", model))
        return now(f"weights-{sum(call[0] == 'name' for call in self.calls)}")

    def weights_of_state(self, name: str) -> Future[str]:
        return now(f"state-{name}")

    def sample(
        self, prompt: Sequence[int], count: int, sampling: Any, *, weights: str
    ) -> Future[list[Sample]]:
        self.calls.append(("sample", list(prompt), count, sampling, weights))
        return now([Sample([7, 8], [-0.5, -0.25], "length")] * count)

    def log_probs(self, tokens: Sequence[int], *, weights: str) -> Future[list[float]]:
        return now([-float(token) for token in tokens[1:]])

    def save_state(self, name: str, *, model: str) -> Future[Path]:
        self.saved.append(name)
        return now(FOLDER / name)

    def load_state(self, name: str, *, model: str, optimizer: bool = True) -> Future[None]:
        if name not in self.saved:
            raise ServiceError(f"state {name}: there is none")
        self.calls.append(("load", name, optimizer))
        return now(None)

    def states(self) -> list[str]:
        return sorted(self.saved)

    def delete_state(self, name: str) -> Future[None]:
        self.saved.remove(name)
        return now(None)


@pytest.fixture(scope="module")
def double() -> Double:
    return Double()


@pytest.fixture(scope="module")
def answers(double) -> Answers:
    lora: Any = SimpleNamespace(rank=8, target_modules=["all-linear"])
    return Answers(double, Served(["embedded", "Qwen/Mine"], "/models/tiny", lora))


@pytest.fixture(scope="module")
def server(answers) -> Iterator[HttpServer]:
    with closing(HttpServer(served_paths.app_of(answers, KEY), "127.0.0.1", 0)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        yield client
        client.close("success").result()


@pytest.fixture(autouse=True)
def of_this_test(double) -> None:
    double.calls.clear()
    double.saved.clear()


def trained(client, **settings) -> Any:
    return client.create_lora_training_client("Qwen/Mine", **{"rank": 8} | settings).result()


def datum(first: int = 1) -> Any:
    inputs = {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([first, 2, 3]), loss_fn_inputs=inputs
    )


def test_chunks_are_done_in_their_order_though_the_first_arrives_last(client, double, monkeypatch):
    monkeypatch.setitem(served_paths.FIXED, "client/config", {})
    model = trained(client)
    model.holder._client_config = model.holder._client_config.model_copy(
        update={"fwdbwd_max_chunk_len": 2}
    )
    result = model.forward_backward(
        [datum(n) for n in range(5)], "ppo", {"clip_high_threshold": 1.3}
    )
    step = model.optim_step(tinker.AdamParams(learning_rate=0.5, grad_clip_norm=1.0))
    assert result.result().metrics == {"loss:sum": 5.0}
    assert len(result.result().loss_fn_outputs) == 5
    assert result.result().loss_fn_outputs[4]["logprobs"].tolist() == [-1.0] * 3
    assert step.result().metrics == {"norm": 2.0}
    done = [call for call in double.calls if call[0] == "ppo"]
    assert [call[1] for call in done] == [[0, 1], [2, 3], [4]]
    assert done[0][2] == {"clip_high_threshold": 1.3}
    assert double.calls[-1] == ("step", (0.5, 0.9, 0.95, 1e-12, 0.0, 1.0))


def test_a_request_that_is_sent_again_is_done_once(client, server, double):
    model = trained(client)
    body = {"model_id": model.model_id, "seq_id": 1, "adam_params": {}, "type": "optim_step"}
    headers = {"X-API-Key": KEY}
    for _ in range(2):
        answer = httpx.post(f"{server.url}/api/v1/optim_step", json=body, headers=headers)
        assert answer.json() == {"request_id": f"{model.model_id}:1"}
    again = {"request_id": f"{model.model_id}:1"}
    answer = httpx.post(f"{server.url}/api/v1/retrieve_future", json=again, headers=headers)
    assert answer.json() == {"metrics": {"norm": 2.0}}
    assert [call[0] for call in double.calls].count("step") == 1


def test_samples_have_their_parameters_ids_and_weights(client, double):
    model = trained(client)
    sampler = model.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=5, seed=3, stop=["x"], top_k=4, top_p=0.5)
    answer = sampler.sample(PROMPT, 2, params, include_prompt_logprobs=True).result()
    assert [one.tokens for one in answer.sequences] == [[7, 8]] * 2
    assert answer.sequences[0].logprobs == [-0.5, -0.25]
    assert answer.sequences[0].stop_reason == "length"
    assert answer.sequences[0].sequence_id != answer.sequences[1].sequence_id
    assert answer.prompt_logprobs == [None, -2.0, -3.0]
    assert double.calls[-1] == ("sample", [1, 2, 3], 2, (5, 1.0, 0.5, 4, ("x",), 3), "weights-1")
    assert sampler.compute_logprobs(PROMPT, 1).result() == [None, None, -3.0]
    assert sampler.compute_logprobs(tinker.ModelInput.from_ints([5])).result() == [None]
    base = client.create_sampling_client(base_model="embedded").result()
    base.sample(PROMPT, 1, tinker.SamplingParams(stop=[9])).result()
    assert double.calls[-1] == ("sample", [1, 2, 3], 1, (None, 1.0, 1.0, None, (9,), None), "base")


def test_inflight_samplers_go_on_to_the_newest_weights_and_others_stay(client, double):
    model = trained(client)
    fixed = model.save_weights_and_get_sampling_client().result()
    moving = model.save_weights_and_get_sampling_client(kind="inflight").result()
    newer = model.save_weights_and_get_sampling_client(kind="inflight").result()
    used = []
    for sampler in (fixed, moving, newer):
        sampler.sample(PROMPT, 1, tinker.SamplingParams()).result()
        used.append(double.calls[-1][-1])
    assert used[1] == used[2] != used[0]


def test_states_have_paths_that_name_the_same_after_a_restart(client, double):
    model = trained(client)
    state = model.save_state("a.1").result().path
    weights = model.save_weights_for_sampler("a.1").result().path
    assert (state, weights) == tuple(
        f"tinker://{model.model_id}/{kind}/a.1" for kind in ("weights", "sampler_weights")
    )
    assert double.saved == [state_of(state), state_of(weights)]
    model.load_state(state).result()
    assert double.calls[-1] == ("load", state_of(state), False)
    other = client.create_training_client_from_state_with_optimizer(state).result()
    assert double.calls[-1] == ("load", state_of(state), True)
    assert other.model_id != model.model_id and other.get_info().lora_rank == 8
    sampler = client.create_sampling_client(model_path=weights).result()
    sampler.sample(PROMPT, 1, tinker.SamplingParams()).result()
    assert double.calls[-1][-1] == f"state-{state_of(weights)}"
    client.create_rest_client().delete_checkpoint_from_tinker_path(state).result()
    assert double.saved == [state_of(weights)]
    with pytest.raises(tinker.RequestFailedError, match="there is no such state in /states"):
        client.create_training_client_from_state(state).result()


@pytest.mark.parametrize("name", ["a/b", "../a", "", "-a", "\N{SNOWMAN}"])
def test_names_of_states_are_those_of_files(name):
    with pytest.raises(ServiceError, match="expected letters, digits"):
        path_of("x:train:0", "weights", name)
    with pytest.raises(ServiceError, match="expected tinker://"):
        state_of(f"tinker://x:train:0/weights/{name}")


@pytest.mark.parametrize(
    ("asks", "says"),
    [
        (
            lambda c: trained(c, rank=4),
            "rank = 4: adapters of this server have rank 8.\nType rank=8",
        ),
        (lambda c: trained(c, train_mlp=False), "lora.target_modules = all-linear"),
        (
            lambda c: trained(c, optimizer=tinker.DimuonOptimizerConfig()),
            "optimizer = dimuon: expected AdamOptimizerConfig",
        ),
        (
            lambda c: c.create_lora_training_client("Qwen/Other", rank=8).result(),
            "base_model = Qwen/Other: this server has embedded, Qwen/Mine.\n"
            "Ask for that, or start it with --name Qwen/Other",
        ),
        (
            lambda c: trained(c).optim_step(tinker.DimuonParams(learning_rate=1)).result(),
            "optim_params = dimuon: expected AdamParams",
        ),
        (
            lambda c: trained(c).forward_backward([datum()], "stable_reinforce").result(),
            "loss stable_reinforce: there is none",
        ),
        (
            lambda c: trained(c).forward([datum()], "ppo", {"kind": "x"}).result(),
            "loss_fn_config: kind is a text, expected a number",
        ),
        (
            lambda c: sampled(c, tinker.SamplingParams(stop=[])),
            "stop = [] would switch the model's end tokens off",
        ),
        (
            lambda c: sampled(c, topk_prompt_logprobs=2),
            "topk_prompt_logprobs = 2 is not supported: leave it out",
        ),
        (
            lambda c: sampled(c, prompt=tinker.ModelInput(chunks=[IMAGE])),
            "prompt has a chunk of image, expected token ids",
        ),
        (
            lambda c: trained(c).forward([with_image()], "cross_entropy").result(),
            "datum 0: model_input has a chunk of image, expected token ids",
        ),
        (
            lambda c: trained(c).forward([of_two_targets()], "cross_entropy").result(),
            "has shape [3, 2], expected one dimension",
        ),
        (
            lambda c: trained(c).save_state("a/b").result(),
            "name = 'a/b': expected letters, digits, '.', '_' and '-'",
        ),
    ],
)
def test_what_is_not_served_is_the_users_error_and_the_client_goes_on(client, asks, says):
    with pytest.raises(tinker.RequestFailedError) as error:
        asks(client)
    assert says in str(error.value) and error.value.category == "user"
    assert trained(client).forward([datum()], "cross_entropy").result().metrics


IMAGE = tinker.types.ImageChunk(data=b"x", format="png", expected_tokens=1)


def with_image() -> Any:
    inputs = datum().loss_fn_inputs
    return tinker.Datum(model_input=tinker.ModelInput(chunks=[IMAGE]), loss_fn_inputs=inputs)


def of_two_targets() -> Any:
    inputs = {"target_tokens": [[2, 3]] * 3, "weights": [[0.5, 0.5]] * 3}
    return tinker.Datum(model_input=PROMPT, loss_fn_inputs=inputs)


def sampled(client, params=None, prompt=PROMPT, **more) -> Any:
    sampler = client.create_sampling_client(base_model="embedded").result()
    return sampler.sample(prompt, 1, params or tinker.SamplingParams(), **more).result()


def test_after_a_refusal_the_same_client_goes_on(client, double):
    model = trained(client)
    with pytest.raises(tinker.RequestFailedError):
        model.forward_backward([datum()], "stable_reinforce").result()
    for path in ("tinker://no", "tinker://0:train:0/weights/no"):
        with pytest.raises(tinker.RequestFailedError):
            model.load_state(path).result()
    assert model.optim_step(tinker.AdamParams()).result().metrics == {"norm": 2.0}


def test_a_failure_inside_is_the_servers_error_and_logged_once(
    client, double, answers, caplog, monkeypatch
):
    model = trained(client)
    monkeypatch.setattr(double, "broken", True)
    for _ in range(2):
        with pytest.raises(tinker.RequestFailedError, match="a rank has died") as error:
            model.forward([datum()], "cross_entropy").result()
        assert error.value.category == "server"
    assert str(answers.failed.result(5)) == "a rank has died"
    assert sum("the server failed" in one.message for one in caplog.records) == 1


def test_keys_versions_and_paths_are_refused_by_name(server, monkeypatch):
    url = f"{server.url}/api/v1/client/config"
    with pytest.raises(tinker.AuthenticationError, match="not the key that this server printed"):
        tinker.ServiceClient(base_url=server.url, api_key="tml-other")._get_session_holder()
    headers = {"X-API-Key": KEY, "X-Stainless-Package-Version": "0.39.1"}
    answer = httpx.post(url, headers=headers, json={})
    assert answer.status_code == 400
    assert "tinker = 0.39.1: expected tinker>=0.38,<0.39" in answer.json()["detail"]
    answer = httpx.post(f"{server.url}/v1{served_paths.__name__}", headers=headers, json={})
    assert answer.status_code == 404
    assert f"TINKER_BASE_URL is {server.url}" in answer.json()["detail"]
    headers = {"X-API-Key": KEY}
    large = httpx.post(url, headers=headers, content=b" " * (17 * 2**20))
    assert large.status_code == 413
    odd = httpx.post(f"{server.url}/api/v1/create_model", headers=headers, json={"rank": 1})
    assert odd.status_code == 400 and "CreateModelRequest: session_id" in odd.json()["detail"]


def test_the_end_of_a_session_ends_its_models(server, double):
    client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    model = trained(client)
    client.close("success").result()
    assert double.calls[-1] == ("delete", "model-1")
    body = {"model_id": model.model_id, "type": "get_info"}
    answer = httpx.post(f"{server.url}/api/v1/get_info", json=body, headers={"X-API-Key": KEY})
    assert answer.status_code == 404 and "Go on from a saved state" in answer.json()["detail"]


def test_sessions_without_heartbeats_end_when_another_needs_room(client, server, double, answers):
    silent = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    model = trained(silent)
    times = answers._clients._sessions
    times[model.model_id.partition(":")[0]] -= SILENT_S + 1
    trained(client)
    assert double.calls == [("create",), ("delete", "model-1"), ("create",)]
    with pytest.raises(tinker.NotFoundError, match="Go on from a saved state"):
        model.optim_step(tinker.AdamParams()).result()


@pytest.mark.parametrize(
    ("installed", "key", "says"),
    [
        ("0.38.4", None, []),
        (
            "0.39.0",
            "mine",
            ["tinker = 0.39.0: expected tinker>=0.38,<0.39", "--key: expected tml-"],
        ),
        (None, "tml-x y", ["tinker, whose messages the server reads, is not", "--key: expected"]),
    ],
)
def test_the_command_refuses_other_versions_and_keys(monkeypatch, installed, key, says):
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(command, "version", version)
    problems = [*command._problems(Namespace(key=key))]
    assert len(problems) == len(says) and all(map(str.startswith, problems, says))


@pytest.mark.parametrize(
    ("folder", "name"), [("/models/q", "/models/q/"), ("/a/b/c", "/a/b/c"), ("Q/q", "Q/q")]
)
def test_a_folders_name_is_one_of_which_the_sdk_takes_the_tokenizer(monkeypatch, folder, name):
    """Of three parts it takes the first two."""
    monkeypatch.setattr(command, "name_or_folder", lambda model: folder)
    args = Namespace(model="m", name=["n", "m"])
    assert command._names(args, model_config("embedded")) == [name, "m", "n"]
