"""Start a program that may read everything, write into a few folders and reach no network.

    python -m zeromismatch.agent_tools.verify.launch '["/run"]' -- python repro.py

For code of a patch that is tried as a whole (its repro, the gates): less tight than a worker, since
engines need files and threads. Exit 126 where the confinement cannot be had.
"""

import json
import os
import sys

from . import confine


def main(arguments: list[str]) -> None:
    """Confine this process, then become the program."""
    writable = [str(each) for each in json.loads(arguments[0])]
    confine.die_with_parent()
    confine.unshare_namespaces(("ipc", "user", "net"))
    faults = [
        confine.drop_capabilities(),
        confine.restrict_files(
            readable=["/"], writable=[*writable, "/dev", "/proc"], execute=True
        ),
        confine.filter_system_calls(threads=True, exec_=True),
    ]
    found = [fault for fault in faults if fault]
    if found:
        print(f"cannot confine: {'; '.join(found)}", file=sys.stderr)
        sys.exit(126)
    command = arguments[arguments.index("--") + 1 :]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
