"""Seeds derived from the run's seed and the purpose of a draw."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed, the BLAKE2b hash of the parts."""
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_seed(run_seed: int, step: int, prompt_id: int, sample: int, *part: int | str) -> int:
    """Return the seed of a sample of a prompt, or of the part of it that `part` names."""
    return derive_seed(run_seed, "sample", step, prompt_id, sample, *part)
