"""Weight sync: moves FSDP shards into vLLM's live tensor-parallel parameters, in place.

Glossary, from whole tensors to bytes:
    Region        hyper-rectangle of a tensor (distributed/regions.py)
    TracedCopy    region of a checkpoint tensor and its place in a parameter of the engine
    Transfer      part of a copy that one rank packs once and sends to every rank that makes it
    Chunk         transfers out of the same rows of every shard of one tensor
    Bucket        chunks that move together; one all-gather and one batch of sends
    Route         ranks that send and ranks that receive; may be equal or disjoint
    Plan          all that one rank copies, packs, sends, receives and unpacks
    RowScales     scales of the rows of weights that become FP8
    CopyRect      rectangle of rows between two buffers, in numbers: input of the copy kernels

Start with resharder.py, then plan.py, transfers.py and executor.py. The loader's trace is made in
rollout/trace.py; the choice of weights that are cut by columns, in distributed/columns.py.
"""
