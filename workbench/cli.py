"""The command `workbench`: runs one subcommand and turns its end into an exit code.

0 success, 1 failed, 2 bad usage, 130 interrupted. A user's mistake is one sentence on stderr, never
a traceback. The commands themselves are in `workbench.commands`, one file each.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: the words after `workbench`; None takes those of this process.
    """
    _accept_any_character()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv) or ["--help"])
        if sys.stdout is not None:  # as it is when the caller closed it
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\nworkbench: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except OSError as wrong:
        place = f"{wrong.filename}: " if wrong.filename else ""
        return _fail(f"{place}{wrong.strerror or wrong}.", 1)


def _run(argv: list[str]) -> int:
    """Run one command; importing the commands is part of it, so that Ctrl-C is quiet then too."""
    import typer

    from engine.errors import WorkbenchError

    # typer carries a click of its own from 0.20 on; both give the usage error this ancestor.
    usage_error: type[Exception] = typer.BadParameter.__mro__[2]
    try:
        code = _command().main(argv, prog_name="workbench", standalone_mode=False)
        if code == INTERRUPTED:  # newer versions of typer catch Ctrl-C themselves
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except WorkbenchError as wrong:
        return _fail(str(wrong), wrong.exit_code)
    except usage_error as wrong:
        return _fail(_usage(wrong, argv), 2)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as left:  # typer's way to say that the reader of stdout went away
        return _reader_left() if left.code == 1 else int(left.code or 0)


@cache
def _command() -> Any:
    """Return the command of all commands, built once: that takes a tenth of a second."""
    import typer

    from workbench.commands import app

    return typer.main.get_command(app)


def _accept_any_character() -> None:
    """Let a terminal without Unicode show escapes instead of ending the command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _usage(wrong: Exception, argv: list[str]) -> str:
    """Return a usage error as a sentence that names the value and says where help is."""
    message: str = wrong.format_message().rstrip(".")  # type: ignore[attr-defined]
    for option in getattr(getattr(wrong, "param", None), "opts", ()):
        for word, following in zip(argv, [*argv[1:], ""], strict=True):
            if word == option and following and following not in message:
                message += f" (it was {following!r})"
    context = getattr(wrong, "ctx", None)
    message = message or "name one of these commands"  # the help has been printed
    path = context.command_path if context is not None else "workbench"
    return f"{message}; see '{path} --help'."


def _fail(sentence: str, code: int) -> int:
    print("workbench:", " ".join(sentence.split()), file=sys.stderr)
    return code


def _reader_left() -> int:
    """Let the interpreter's last flush go nowhere instead of complaining about a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 1
