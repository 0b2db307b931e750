"""Observer that runs the health checks on each step, and writes health.jsonl."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from hybridrl.app.observers import OpenedObserver, Start
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.rows import MAX_FAULTS_SHOWN, first_faults
from hybridrl.data.sources.tokenizer import decoder
from hybridrl.health.findings import HEALTH_FILE, Finding, Health
from hybridrl.health.measures import MarkedTokens, marked_tokens, response_measures, token_details
from hybridrl.trainer.record import Responses, StepRecord
from hybridrl.trainer.tracking.best_effort_files import replace_text
from hybridrl.trainer.tracking.tracker import read_metrics


class HealthChecks(OpenedObserver):
    """Health checks of a run, opened before its workers start: the data is examined at once."""

    def __init__(self, start: Start, tokens: MarkedTokens | None = None) -> None:
        super().__init__(start)
        self._tokens = tokens or marked_tokens(start.config.model, start.tokenizer)
        self._decode = decoder(start.tokenizer, special=True)
        self._path = start.run_dir / HEALTH_FILE
        self._failed_problems: set[int] = set()
        self._health = Health(start.config, start.rows, self._keep_earlier())
        self.first = dict(start.prompts.measures)
        for finding in self._store(self._health.examine(self.first, start.prompts.details)):
            start.warn(finding.text)

    def begin(
        self, token_stats: Callable[[RolloutBatch], Ragged], place: Callable[[int], str]
    ) -> None:
        """Learn how to compute log-probs after an update, and to describe an engine's ranks."""
        self._token_stats, self._place = token_stats, place

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
        findings = self._health.examine(metrics, details, record.step, self._place)
        warnings = [finding.text for finding in self._store(findings)]
        return replace(record, metrics=metrics, warnings=[*record.warnings, *warnings])

    def _keep_earlier(self) -> set[str]:
        """Keep the findings of the steps that a resumed run goes on from; return their checks."""
        last, kept = (self.start.rows[-1]["step"] or 0) if self.start.rows else -1, []
        with suppress(OSError):
            if not self._path.is_file():
                return set()
            kept = [line for line in read_metrics(self._path) if (line["step"] or 0) <= last]
            replace_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        return {str(line["check"]) for line in kept}

    def _store(self, findings: Sequence[Finding]) -> Sequence[Finding]:
        """Append findings to health.jsonl, best effort: the console and main.log have them, too."""
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(finding)) + "\n" for finding in findings)
        return findings

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
