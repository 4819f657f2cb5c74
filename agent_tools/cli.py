"""The command line ``zm``: a thin skin over functions that an agent calls as well.

Every command returns an :class:`.commands.answer.Answer`; this module parses, runs, prints the
answer, and turns errors into exit codes:

    0 equal or passed          1 divergent, gate failed, autopilot stuck
    2 unusable arguments       3 inconclusive or misaligned
    4 something is missing     5 budget or time spent
    70 our own fault           130 interrupted

Left out on purpose: any decision about bits, and any import of torch before a command needs it.

    zm --help
"""

import errno
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

import typer

from ..kernels.errors import DiskError, ZeroMismatchError
from .commands import (
    agent,
    draft,
    gate,
    job,
    measure,
    patch,
    playbook,
    project,
    recipe_pr,
    registry,
    repro,
    serve,
    study,
    train,
    verify,
)
from .commands.answer import Answer, error_answer, write

INTERNAL_ERROR = 70
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

app = typer.Typer(
    name="zm",
    help="Find out whether two engines compute the same bits, name where they do not, align them.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for group in (
    project, measure, gate, registry, repro, verify, draft, patch, job, serve, train, study,
    playbook, recipe_pr, agent,
):  # fmt: skip
    group.register(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command, print its answer or its error, and return the exit code."""
    as_json = "--json" in arguments
    words = list(arguments) or ["--help"]
    answer = attempt(lambda: app(args=words, prog_name="zm", standalone_mode=False))
    if isinstance(answer, Answer) and (as_json or answer.error is None):
        write(answer, as_json=as_json)
    return answer.exit_code if isinstance(answer, Answer) else answer


def attempt(work: Callable[[], "Answer | int | None"]) -> "Answer | int":
    """What ``work`` answers, errors among it; a number for --help and for an interrupt (130)."""
    try:
        return work() or 0
    except ZeroMismatchError as error:
        return error_answer(error, error.exit_code)
    except typer.TyperException as error:
        message = f"{error.format_message()} (`zm --help` lists the commands, each has --help)"
        return error_answer(typer.TyperException(message), error.exit_code)
    except OSError as error:
        if error.errno in NO_ROOM:
            full = DiskError(f"no room left to write {error.filename or 'a file'}: free some disk")
            return error_answer(full, full.exit_code)
        return _fault(error)
    except Exception as error:  # noqa: BLE001 - the outermost handler: what nobody expected
        return _fault(error)


def _fault(error: Exception) -> Answer:
    traceback.print_exception(error, file=sys.stderr)
    fault = RuntimeError(f"{type(error).__name__}: {error}; a fault of zm itself, please report it")
    return error_answer(fault, INTERNAL_ERROR)


def _show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    print(f"zm: warning: {message}", file=sys.stderr)


def main() -> None:
    """Entry point of the ``zm`` script."""
    warnings.showwarning = _show_warning
    sys.exit(run(sys.argv[1:]))
