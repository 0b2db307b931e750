"""The one exception for what the user can fix."""


class ConfigError(ValueError):
    """What the user can fix before a run: every problem found, in one report.

    Args:
        problems: one text per problem, in the shape "key = value found, what was expected,
            why it matters, what to type".
    """

    # What the problems are of, for the first line.
    subject = "in the config"

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = list(problems)

    def __str__(self) -> str:
        count = len(self.problems)
        listed = "\n".join("- " + problem.replace("\n", "\n  ") for problem in self.problems)
        return f"{count} problem{'s' if count != 1 else ''} {self.subject}\n{listed}"
