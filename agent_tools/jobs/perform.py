"""The inner process of a job: calls the function of one tool and writes its answer down.

    python -m zeromismatch.agent_tools.jobs.perform FOLDER PARENT      # `supervise.py` calls it

The answer is the one that ``zm`` would print: document, text and exit code, or the error with its
next step. It runs in the workspace, with stdout and stderr going to the job's log.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from ...kernels.files import replace_whole
from ..cli import attempt
from ..commands.answer import Answer, as_document, plain_text
from .operations import OPERATIONS

PR_SET_PDEATHSIG = 1


def perform(folder: Path) -> None:
    """Run the job's tool and write ``result.json``."""
    call = json.loads((folder / "call.json").read_text())
    operation = OPERATIONS[call["tool"]]
    with contextlib.redirect_stdout(sys.stderr):
        answer = attempt(lambda: operation.run(call["arguments"]))
    assert isinstance(answer, Answer), "a tool answers"
    result = {
        "document": as_document(answer.document),
        "text": plain_text(answer.text),
        "exit_code": answer.exit_code,
        "error": answer.error,
    }
    replace_whole(folder / "result.json", json.dumps(result))


def main() -> None:
    """Entry point; ends at once if the supervisor is gone, and with it from now on."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == int(sys.argv[2]):
        perform(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
