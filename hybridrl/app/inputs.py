"""Inputs of a run: prompts, models and the checkpoint to resume from."""

from dataclasses import dataclass
from pathlib import Path

from hybridrl.checkpoint import verification
from hybridrl.checkpoint.verification import Verify
from hybridrl.config.schema import RunConfig
from hybridrl.data.sources.prompt_source import PromptSource, prompt_source
from hybridrl.data.sources.prompts import PromptSets
from hybridrl.trainer.checkpointing.base_models import Fingerprints, base_models
from hybridrl.trainer.checkpointing.resume import Resume, find_resume


@dataclass(frozen=True)
class RunInputs:
    """Inputs that a run reads before workers are built.

    Attributes:
        prompts: for training and evaluation.
        source: training prompts in the order in which they are drawn.
        models: fingerprints of the base models.
        resume: the checkpoint to resume from; None: none.
    """

    prompts: PromptSets
    source: PromptSource
    models: Fingerprints
    resume: Resume | None


def read_inputs(
    config: RunConfig,
    run_dir: Path,
    prompts: PromptSets,
    verify: Verify = verification.verify,
) -> RunInputs:
    """Read the inputs of a run; writes nothing.

    Args:
        config: of the run.
        run_dir: its directory.
        prompts: its prompts.
        verify: verifies a checkpoint.

    Raises:
        ConfigError: a problem of a model or of the checkpoint.
    """
    source = prompt_source(prompts, config.data, config.seed)
    models = base_models(config)
    # Takes seconds for hundreds of thousands of prompts: not during the first checkpoint.
    known = source.fingerprint
    resume = find_resume(config, run_dir, models, known, verify)
    return RunInputs(prompts, source, models, resume)
