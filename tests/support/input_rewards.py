"""Rewards and an environment that go wrong; imports nothing, as their processes start anew."""


def raises_on_nothing(prompt, response, example):
    """As rewards do that index into what they split."""
    return float(response.split()[0] == "x")


def hangs(prompt, response, example):
    """Never comes back."""
    while True:
        pass


def shrugs(prompt, response, example):
    """Right or wrong, it is all the same."""
    return 0.5


class Refuses:
    """An environment that breaks at an empty turn."""

    def __init__(self, example):
        pass

    def reset(self):
        """Says nothing."""
        return ""

    def step(self, text):
        """Reads the first letter."""
        return text[0]
