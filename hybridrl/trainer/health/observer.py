"""Observer that runs the health checks on each step."""

from collections.abc import Callable
from dataclasses import replace

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.rows import MAX_FAULTS_SHOWN, first_faults
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.trainer.health.health import Health
from hybridrl.trainer.health.measures import MarkedTokens, response_measures, token_details
from hybridrl.trainer.record import Observer, Responses, StepRecord


class HealthChecks(Observer):
    """Health checks of a run.

    Args:
        health: the checks, with what they know of earlier steps.
        tokens: end tokens and special tokens of the model.
        decode: token ids -> texts, special tokens included.
        token_stats: log-probs after the update, in the real part.
        place: describes the ranks of a rollout engine.
    """

    def __init__(
        self,
        health: Health,
        tokens: MarkedTokens,
        decode: Decode,
        token_stats: Callable[[RolloutBatch], Ragged],
        place: Callable[[int], str],
    ) -> None:
        self._health = health
        self._tokens = tokens
        self._decode = decode
        self._token_stats = token_stats
        self._place = place
        self._failed_problems: set[int] = set()

    def after(self, record: StepRecord) -> StepRecord:
        """Add metrics of the responses and of checks that warn, and the warnings."""
        details: dict[str, Callable[[], str]] = {}
        trained = record.trained
        if trained is not None and (responses := trained.responses) is not None:
            batch = trained.batch
            record = record.adding(response_measures(batch, self._tokens))
            details = token_details(batch, lambda: self._token_stats(batch), self._decode)
            if responses.rewarded.failures:
                text = self._failures(responses)
                details["failed_rewards"] = lambda: text
        metrics = dict(record.metrics)
        warnings = self._health.examine(metrics, details, record.step, self._place)
        return replace(record, metrics=metrics, warnings=[*record.warnings, *warnings])

    def _failures(self, responses: Responses) -> str:
        """Describe the first failed reward, with the places of problems not named before."""
        failures = responses.rewarded.failures
        text = f"{failures[0].kind}: {failures[0].reason}"
        new: dict[int, str] = {}
        for failure in failures:
            prompt = responses.prompts[failure.index]
            if prompt.prompt_id not in self._failed_problems:
                new.setdefault(prompt.prompt_id, f"{prompt.where}: {failure.reason}")
        self._failed_problems.update([*new][:MAX_FAULTS_SHOWN])
        return "\n".join([text, first_faults([*new.values()])] if new else [text])
