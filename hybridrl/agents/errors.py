"""Errors of a request, which the formats of the endpoint send as their SDKs expect."""


class RequestError(Exception):
    """Refusal of a request.

    Args:
        message: what is wrong, for the program's author.
        status: HTTP status; 400: the request, 401: the key, 404: the model, 413: its size.
        param: the parameter at fault.
        code: of the OpenAI API, such as unsupported_parameter.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


def refused_parameter(name: str, value: object, why: str) -> RequestError:
    """Return the error of a parameter that cannot be honoured."""
    message = f"Unsupported parameter: {name} = {value!r}. {why}"
    return RequestError(message, param=name, code="unsupported_parameter")


def too_long(context: int, has: str) -> RequestError:
    """Return the error of a prompt that leaves no room for a token, of which it `has` so many."""
    return RequestError(
        f"This model's maximum context length is {context} tokens (rollout.max_prompt_tokens + "
        f"max_response_tokens); the prompt has {has}.",
        param="messages",
        code="context_length_exceeded",
    )
