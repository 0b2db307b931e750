"""Start an agent's program in a sandbox: with the question, the endpoint and its folder alone.

    'agent.args.command=[python,/path/sandboxed_agent.py,/usr/bin/my_agent]'

The program finds question.json in its folder, and neither the reference answer nor other files and
processes of yours. It can reach the network. It needs bubblewrap, and to be installed below /usr.
"""

import json
import os
import sys

SANDBOX = """
bwrap --unshare-all --share-net --die-with-parent --proc /proc --dev /dev --ro-bind /usr /usr
--symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64
--bind . /work --chdir /work
"""

with open(os.environ["HYBRIDRL_TASK_FILE"]) as task, open("question.json", "w") as question:
    json.dump(json.load(task)["messages"], question)
kept = {name: os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY")}
os.execvpe("bwrap", [*SANDBOX.split(), *sys.argv[1:]], kept | {"PATH": "/usr/bin"})
