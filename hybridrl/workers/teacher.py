"""Teachers: frozen models that score each token of the student's responses.

One worker has all teachers of a run. In the phase score each of them runs over the micro-batches of
the actor's update, of which it computes its own rows:

    log q of each response token          -> the driver, for objective=sampled
    states before the head, [R, G]        -> host memory of this process, for divergences

In the update, the actor asks for the target of its next micro-batch, a function of the student's
states. It computes the divergence over the vocabulary chunk by chunk. No logits leave a process.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.config.choices import Divergence
from hybridrl.config.schema import ModelConfig, TeacherConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed.forward.divergence import divergence
from hybridrl.distributed.forward.log_probs import Entropy
from hybridrl.distributed.forward.packing import to_device
from hybridrl.distributed.forward.token_models import Head, Target, TokenLogProbs
from hybridrl.distributed.fsdp import load_sharded_policy
from hybridrl.distributed.offload import Offloadable
from hybridrl.workers.base import Dispatch, on_all_ranks
from hybridrl.workers.model_worker import ModelWorker


class Teacher(NamedTuple):
    """A teacher's model, and its weights as they are offloaded."""

    model: TokenLogProbs
    weights: Offloadable


class TeacherWorker(ModelWorker):
    """Worker that scores responses by teachers. One instance per rank, each with their shards.

    To change the scores, subclass, override `score`, and set
    `teacher.worker=my_package.MyTeacherWorker`.
    """

    config_class = TeacherConfig
    config: TeacherConfig

    def __init__(self, config: TeacherConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.teachers = [self._load(path) for path in config.paths.values()]
        # Of each teacher: its states of the micro-batches that are not trained yet, and its head.
        self.states: list[list[Tensor]] = []
        self.heads: list[Head] = []
        self.dtype = getattr(torch, config.fsdp.param_dtype)

    def _load(self, path: str) -> Teacher:
        config = self.config
        lm = ModelConfig(path=path, init=config.init, seed=config.seed, trust_remote_code=False)
        # Cut columns, and kernels that are shared with vLLM, are for the policy alone.
        fsdp = replace(config.fsdp, columns=None, exact=False)
        model = load_sharded_policy(lm, fsdp, self.mesh, config.log_prob_chunk_tokens)
        self.own(model)
        self.rest()
        return Teacher(model, self.weights)

    @on_all_ranks(Dispatch.SHARD_DP)
    def compute_log_probs(self, batch: RankBatch) -> Ragged:
        """Compute each row's teacher's log-probs of the response tokens: ragged float32, nats,
        on CPU.

        Rows are in the order of the first epoch's micro-batches.
        """
        self.states, self.heads, parts = [], [], []
        for index, teacher in enumerate(self.teachers):
            self.rest()  # of the teacher before
            self.model, self.weights = teacher.model, teacher.weights
            self.states.append([])
            parts.append(self.over_first_epoch(batch, partial(self.score, index)))
            if not self.config.is_sampled:
                self.heads.append(teacher.model.gathered_head(self.dtype))
        return parts[0].like(torch.stack([part.values for part in parts]).sum(0))

    def score(self, index: int, micro: RolloutBatch) -> Tensor:
        """Compute teacher `index`'s log-probs of its rows' response tokens, 0 on others: [R].

        Without a row of its own it computes one of another's, since all ranks take part.
        """
        rows, teacher = self.rows(index, micro), self.teachers[index]
        batch = micro if len(rows) == len(micro) else micro.select(rows or [0])
        if "teacher_prompts" in batch.added:
            batch = replace(batch, prompts=batch.teacher_prompts)
        packed = self.pack(batch)
        output = teacher.model(packed, self.config.temperature, Entropy.omit)
        own = self.tokens(rows, micro)
        if not self.config.is_sampled:
            self.states[index].append(output.states[: len(own)].cpu())
        values = output.log_probs[: len(own)]
        return values.new_zeros(len(micro.responses.values)).index_copy_(0, own, values)

    def rows(self, index: int, micro: RolloutBatch) -> list[int]:
        """Return the rows of a micro-batch that teacher `index` scores."""
        if "teacher" not in micro.added:
            return list(range(len(micro)))
        return (micro.teacher == index).nonzero().flatten().tolist()

    def tokens(self, rows: list[int], micro: RolloutBatch) -> Tensor:
        """Return the places of some rows' response tokens among all, [R] int64, on the device."""
        chosen = torch.zeros(len(micro), dtype=torch.bool)
        chosen[rows] = True
        places = micro.responses.spread(chosen).nonzero().flatten()
        return to_device(places, self.device)

    def target(self, micro: RolloutBatch) -> Target:
        """Return the divergence from the teachers of the next micro-batch of the update.

        It is a function of the student's states and head: [R] float32, nats.
        """
        parts = [
            (self.tokens(self.rows(index, micro), micro), self.states[index].pop(0))
            for index in range(len(self.teachers))
        ]
        if sum(len(own) for own, _ in parts) != len(micro.responses.values):
            raise RuntimeError("the update's micro-batches are not those that the teachers scored")

        def compute(states: Tensor, head: Head) -> Tensor:
            total = torch.zeros(len(states), device=states.device)
            for (own, of_teacher), teacher_head in zip(parts, self.heads, strict=True):
                student = states if len(own) == len(states) else states[own]
                moved = of_teacher.to(self.device, non_blocking=True)
                values = self.divergence(student, head, moved, teacher_head)
                total = values if len(own) == len(states) else total.index_add(0, own, values)
            return total

        return compute

    def free_heads(self) -> None:
        """Free the copies of heads, which the next `compute_log_probs` makes again."""
        self.heads = []

    def divergence(self, states: Tensor, head: Head, of_teacher: Tensor, teacher: Head) -> Tensor:
        """Compute the objective's divergence of each token, [R] float32, nats."""
        config = self.config
        return divergence(
            states,
            head.weight,
            of_teacher / (teacher.divisor / head.divisor),
            teacher.weight,
            kind=Divergence(config.objective.value),
            beta=config.beta,
            top_k=config.top_k,
            top_of=config.top_of,
            vocab=min(len(head.weight), len(teacher.weight)),
            temperature=config.temperature * head.divisor,
            chunk_tokens=config.divergence_chunk_tokens,
            cap=head.cap,
            teacher_cap=teacher.cap,
            banned=head.banned,
        )
