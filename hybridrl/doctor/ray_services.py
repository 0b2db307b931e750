"""Stage ray_services."""


def check(case):
    """Nothing yet."""
    return []
