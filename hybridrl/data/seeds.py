"""Seeds that are pure functions of what they are for."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the run's seed and what the draw is for (BLAKE2b of the parts).

    Example: derive_seed(run_seed, "sample", step, prompt_id, sample_index)
    """
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
