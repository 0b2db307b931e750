"""JSON out of files that users name."""

import json
from typing import Any

from hybridrl.config.command.input_errors import reason_of


def parse_json(data: bytes) -> Any:
    """The value that JSON in UTF-8 stands for.

    Raises:
        ValueError: there is none, and why: of text that is not JSON, of numbers that are too long
            and of values that are nested too deeply, which json reports in four ways.
    """
    try:
        return json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"not JSON: {error.msg} ({at}column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error.reason} (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not readable as JSON: {reason_of(error)}") from error
