"""Runs `convert` in forks of one process that has already imported everything, and kills them at a given point.

Reads JSON lines {"arguments": [...], "stdout": FILE, "stderr": FILE, "cwd": FOLDER or null, "environment": {...},
"kill": [FUNCTION, NTH, WHEN] or null}; answers with the process id at once, and with the exit code, or minus the
signal, at the end. FUNCTION is ``module:attribute``; WHEN is ``before``, ``after``, or ``torn``: after half of the file
that is the call's second argument. The product knows nothing of this: the function is replaced in the fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from typing import Any

# What a run imports when it needs it.
import datasets.packaged_modules
import optimum.utils
import pandas

import convert.run
from convert.cli import main


def kill_at(function: str, nth: int, when: str) -> None:
    """Makes the nth call of a function the last thing that this process does."""
    module, _, attribute = function.partition(":")
    owner: Any = importlib.import_module(module)
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), 0

    def killing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == nth:
            if when == "torn":
                os.truncate(args[1], os.path.getsize(args[1]) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, killing)


def work(request: dict[str, Any]) -> None:
    """The fork: never returns."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        # Both may be one file, or a terminal, which is not to become this process's own.
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY)
        os.dup2(file, descriptor)
    os.environ.update(request["environment"])
    if request["cwd"]:
        os.chdir(request["cwd"])
    if request["kill"]:
        kill_at(*request["kill"])
    try:
        main(request["arguments"], prog_name="convert")
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)


if __name__ == "__main__":
    assert convert.run and datasets.packaged_modules and optimum.utils and pandas
    # The collector would touch, and so copy, every page that forks share.
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            work(json.loads(line))
        print(child, flush=True)
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
