"""Unmodified clients and frameworks from PyPI, each with one small episode (tests/support/clients).

Each trained token was sampled, a second turn continues the first one, and nothing hangs.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents_serving import Served, serving

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements" / "clients.txt"
# Turns of each token sequence. mini-swe-agent leaves answers without a command out of its history,
# smolagents appends a closing tag to them: each turn begins a new sequence.
TURNS = {
    "anthropic_sdk": [2],
    "langgraph_agent": [2],
    "litellm_client": [2, 1],
    "mini_swe_agent": [1, 1, 1],
    "openai_agents_sdk": [2, 2],
    "openai_sdk": [2, 1],
    "pydantic_ai_agent": [2],
    "smolagents_agent": [1, 1, 1],
}


@pytest.fixture(scope="module")
def python() -> Path:
    """Python of an environment with the pinned clients, which is kept for the next time."""
    digest = hashlib.blake2b(REQUIREMENTS.read_bytes(), digest_size=8).hexdigest()
    folder = ROOT / "tests" / ".slow" / f"clients-{digest}"
    found = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(found), "-m", "pip", "install", "-q", "-r", str(REQUIREMENTS)]
        subprocess.run(install, check=True, timeout=280)
        (folder / "complete").touch()
    return found


@pytest.fixture(scope="module")
def served(python, tmp_path_factory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("engine")) as one:
        yield one


def test_each_client_is_tried():
    scripts = {path.stem for path in (ROOT / "tests" / "support" / "clients").glob("*.py")}
    assert scripts == TURNS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("client", TURNS)
def test_a_client_as_published_trains_what_it_sampled(client, python, served):
    episode = served.episode()
    variables = {
        "OPENAI_BASE_URL": served.url,
        "OPENAI_API_KEY": episode.key,
        "ANTHROPIC_BASE_URL": served.url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": episode.key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    script = ROOT / "tests" / "support" / "clients" / f"{client}.py"
    done = subprocess.run(
        [str(python), str(script)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    batch = served.batch(episode)
    assert batch.conversation.turns.tolist() == TURNS[client]
    assert all(row.any() for row in batch.response_mask.rows())
