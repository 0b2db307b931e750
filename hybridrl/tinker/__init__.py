"""A server with which the SDK of Tinker works: `pip install 'hybridrl[tinker]'`."""

import re

# Versions of the SDK that the server knows.
SUPPORTED = "tinker>=0.38,<0.39"


def is_supported(version: str) -> bool:
    """Return whether the server knows a version of the SDK."""
    return re.fullmatch(r"0\.38\.\d+", version) is not None
