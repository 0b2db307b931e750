"""How verifiers runs in the processes of programs: chats without a program of their own, and keys.

verifiers starts another program for each chat of its harness `null`, which takes a second, and has
one key for all requests. Here the same program runs in this process, all requests
share one HTTP client, and each has the key of its episode.
"""

import copy
import functools
import sys
import traceback
from typing import Any

# Header of a client's config with the key of an episode.
KEY = "x-api-key"
CHAT, MESSAGES = "verifiers' chat program", "--initial-messages-file="


@functools.cache
def adapt() -> None:
    """Change verifiers in this process, as described above."""
    import httpx
    from verifiers.v1.harnesses.null import harness as null
    from verifiers.v1.interception.server import InterceptionServer as Server
    from verifiers.v1.runtimes import ProgramResult as Result
    from verifiers.v1.runtimes import SubprocessRuntime as Local

    client_of, prepare, run_program = Server._client, Local.prepare_uv_script, Local.run_program
    chat: dict[str, Any] = {"__name__": CHAT}
    http = httpx.AsyncClient(timeout=None, trust_env=False)
    exec(compile(null.CHAT_PROGRAM_SOURCE, CHAT, "exec"), chat)
    chat["DefaultAsyncHttpxClient"] = lambda **_: http  # one of its own costs an episode 30 ms

    def client_with_key(self: Any, config: Any) -> Any:
        if KEY not in config.headers:
            return client_of(self, config)
        client = copy.copy(client_of(self, config.model_copy(update={"headers": {}})))
        client.api_key = config.headers[KEY]
        return client

    async def ran(self: Any, argv: list[str], env: dict[str, str]) -> Any:
        if argv[0] != CHAT:
            return await run_program(self, argv, env)
        # Read before it first awaits. Files are in the episode's folder.
        sys.argv = [arg.replace(MESSAGES, f"{MESSAGES}{self.workdir}/", 1) for arg in argv]
        try:
            await chat["main"]()
        except (Exception, SystemExit):
            return Result(exit_code=1, stdout="", stderr=traceback.format_exc())
        return Result(exit_code=0, stdout="", stderr="")

    async def prepared(self: Any, script: Any, *args: Any, **options: Any) -> list[str]:
        return [CHAT] if script == CHAT else await prepare(self, script, *args, **options)

    null.CHAT_PROGRAM_SOURCE, Server._client = CHAT, client_with_key
    Local.prepare_uv_script, Local.run_program = prepared, ran
