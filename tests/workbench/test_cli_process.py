"""The command as a process: help at once, a quiet end on Ctrl-C and on a closed pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from workbench import paths

COMMAND = (sys.executable, "-m", "workbench")
LONG = ("generate", "Once", "--max-tokens", "400")


def start(*words, **options):
    return subprocess.Popen(
        [*COMMAND, *words],
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        cwd=paths.root(),
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        [],
        ["--version"],
        ["generate", "--help"],
        ["explain", "-h"],
        ["trace", "--help"],
        ["start", "--help"],
        ["bench", "decode", "--help"],
    ],
)
def test_help_loads_neither_torch_nor_numpy(words):
    script = (
        "import sys; from workbench.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'tokenizers', 'panel'} & set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, cwd=paths.root(), check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout and not ended.stderr


def test_bad_usage_has_exit_code_2_and_one_line():
    with start("generat") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == b"" and err.count(b"\n") == 1
    assert b"generat" in err and b"--help" in err


def test_ctrl_c_ends_with_130_and_no_traceback():
    with start(*LONG) as process:
        assert process.stdout.read(1), "no text came"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == b"\nworkbench: interrupted.\n"


def test_a_reader_that_leaves_ends_it_quietly():
    with start(*LONG) as process:
        assert process.stdout.read(1), "no text came"
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=60)
    assert process.returncode == 1 and err == b""


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_terminal_without_unicode_gets_escapes(more):
    script = "import sys; from workbench.cli import main; sys.exit(main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", script, "explain", "ü", "--token=1", "--layer=0", *more],
        capture_output=True,
        cwd=paths.root(),
        env={**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0 and not ended.stderr
    assert ended.stdout.isascii() and (rb"\u00fc" if more else rb"\xfc") in ended.stdout


def test_a_full_disk_on_stdout_is_one_sentence():
    with open("/dev/full", "wb") as full, start("model", "verify", stdout=full) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.count(b"\n") == 1 and b"No space left" in err
