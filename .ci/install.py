"""Run `pip install` calmly: a few dots; all it says goes to a log, shown only if it fails.

Of several that are started for one folder, one runs and the others wait for it.

Usage: python .ci/install.py LOG ARGUMENT...
"""

import contextlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LAST_LINES = 15
PIP_S = 60.0
EVERY = 4
"""Packages a dot: some hundred of them fit on one line."""


def main(log: str, *arguments: str) -> int:
    """Install once nobody else does so here, and return pip's exit code."""
    with alone(Path(log).parent):
        return install(log, *arguments)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with this process; say so while another one has it."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with (folder / ".installing").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("  another set-up runs here; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Whoever makes the environment puts pip into it last.
        end = time.monotonic() + PIP_S
        while importlib.util.find_spec("pip") is None and time.monotonic() < end:
            time.sleep(0.5)
            importlib.invalidate_caches()
        yield


def install(log: str, *arguments: str) -> int:
    """Install, and return pip's exit code."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    packages = 0
    with (
        Path(log).open("w", encoding="utf-8") as kept,
        subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip,
    ):
        assert pip.stdout is not None
        print("  looking for them ", end="", flush=True)
        for line in pip.stdout:
            kept.write(line)
            if line.startswith("Collecting "):
                packages += 1
                if packages % EVERY == 0:
                    print(".", end="", flush=True)
            elif line.startswith("Installing collected"):
                print(f" {packages} packages\n  installing them", end="", flush=True)
    print("" if pip.returncode else ": done", flush=True)
    if pip.returncode:
        last = Path(log).read_text("utf-8").splitlines()[-LAST_LINES:]
        print("\n".join(last), f"The whole of it is in {log}.", sep="\n", file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
