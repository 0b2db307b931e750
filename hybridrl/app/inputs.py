"""What a run begins from: prompts, models and, perhaps, a checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from hybridrl.checkpoint.verification import Confirm, Watch, unconfirmed, unwatched
from hybridrl.config.schema import RunConfig
from hybridrl.data.sources.prompt_sets import PromptSets, prompt_source
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.trainer.checkpointing.base_models import Fingerprints, base_models
from hybridrl.trainer.checkpointing.resume import Resume, find_resume


@dataclass(frozen=True)
class RunInputs:
    """All that a run reads before any worker is built.

    Attributes:
        prompts: for training and evaluation.
        source: those for training, in the order in which they are drawn.
        models: fingerprints of those that it takes from elsewhere.
        resume: what it goes on from; None: it begins.
    """

    prompts: PromptSets
    source: PromptSource
    models: Fingerprints
    resume: Resume | None


def read_inputs(
    config: RunConfig,
    run_dir: Path,
    prompts: PromptSets,
    watch: Watch = unwatched,
    confirm: Confirm = unconfirmed,
) -> RunInputs:
    """Look at what a run begins from; nothing is written.

    Args:
        config: the run.
        run_dir: its directory.
        prompts: its.
        watch: told how far a checkpoint has been read.
        confirm: reads a checkpoint's files elsewhere.

    Raises:
        ConfigError: whatever is wrong with a model, or with going on from the checkpoint.
    """
    source = prompt_source(prompts, config.data, config.seed)
    models = base_models(config)
    # Seconds of hundreds of thousands of prompts, which no checkpoint is to wait for.
    known = source.fingerprint
    resume = find_resume(config, run_dir, models, known, watch, confirm)
    return RunInputs(prompts, source, models, resume)
