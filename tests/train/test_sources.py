"""The builder's readers on small invented packages."""

from __future__ import annotations

import io
import json
import lzma
import struct
import subprocess
import tarfile
import zlib
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.train.corpus import (
    arithmetic,
    build,
    libreoffice,
    metamath,
    novels,
    packages,
    poems,
    stdlib,
    sword,
)
from engine.train.corpus.__main__ import main
from engine.train.data import documents, split_of

PAGE = """<html><body><header><p>LibreOffice Help</p></header><div id="DisplayArea">
<h1>Saving\u00a0 a
file</h1><p>Press the button.</p><script>no</script><div class="howtoget"><p>Menu</p></div><p> </p>
</div></body></html>"""


def test_a_help_page_keeps_headings_and_paragraphs_and_its_key_has_no_language(
    tmp_path: Path,
) -> None:
    page = tmp_path / "usr/share/libreoffice/help/de/text/swriter/guide/save.html"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE, encoding="utf-8")
    assert list(libreoffice.pages(tmp_path)) == [
        ("office/swriter/guide/save", "Saving a file\nPress the button.")
    ]


def test_a_sword_module_gives_its_books_in_sentences(tmp_path: Path) -> None:
    book = (
        '<div osisID="Mark" type="book"/><title>T</title><w>One</w> word<note>n</note>, '
        "<transChange>and</transChange><w>two</w>. " + "Again and again. " * 250
    )
    blocks = [b"", zlib.compress(book.encode()), zlib.compress(b"<verse/>No book here.")]
    _write_sword(tmp_path, blocks)
    pieces = list(sword.books(tmp_path))
    assert [key for key, _ in pieces] == ["bible/Mark#00000", "bible/Mark#00001"]
    assert pieces[0][1].startswith("One word, and two. Again")
    assert all(text.endswith("again.") and len(text) <= 3000 for _, text in pieces)


@pytest.mark.parametrize("kind", ["Z", "z"])
def test_novels_are_read_from_serialised_strings(tmp_path: Path, kind: str) -> None:
    parts = [line for n in range(14) for line in (f"Part {n}.", "")]
    lines = ["It is a truth", " universally known.", "", *parts]
    _write_novels(tmp_path, lines, kind)
    pieces = list(novels.novels(tmp_path))
    assert [key for key, _ in pieces] == ["novel/0/00000", "novel/0/00012"]
    assert pieces[0][1].startswith("It is a truth universally known.\nPart 0.\n")


def test_python_files_with_a_foreign_notice_or_in_tests_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "usr/lib/python3.11"
    code = "value = 1\n" * 100
    for name, text in {
        "good.py": code,
        "psf.py": "# Licensed to PSF under a Contributor Agreement. Copyright X\n" + code,
        "foreign.py": "# Copyright 1999 A Company\n" + code,
        "short.py": "x = 1\n",
        "test/test_good.py": code,
        "umlaut.py": "# ä\n" + code,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    assert [key for key, _ in stdlib.modules(tmp_path)] == ["stdlib/good.py", "stdlib/psf.py"]


def test_metamath_gives_comment_label_and_formula_without_the_proof(tmp_path: Path) -> None:
    database = tmp_path / "usr/share/metamath/databases/set.mm"
    database.parent.mkdir(parents=True)
    database.write_text(
        "$( Modus ponens.\n   (Contributed by NM, 1-Jan-1990.) $)\n"
        "mp $p |- ps $= ( a b ) c $.\n$( <HTML> no $)\nbad $a |- ph $.\n"
    )
    assert list(metamath.statements(tmp_path)) == [("setmm/000000", "Modus ponens.\n  mp |- ps")]


def test_poems_have_title_author_and_lines(tmp_path: Path) -> None:
    poem = {"title": "靜夜思", "author": "李白", "paragraphs": ["床前明月光"], "id": "x"}
    (tmp_path / "poet.tang.0.json").write_text(json.dumps([poem] * 9), encoding="utf-8")
    found = list(poems.poems(tmp_path))
    assert [key for key, _ in found] == ["tang/poet.tang.0/00000", "tang/poet.tang.0/00008"]
    assert found[1][1] == "靜夜思\n李白\n床前明月光"


def test_arithmetic_is_right_repeatable_and_split_problem_by_problem() -> None:
    made = list(arithmetic.problems(30_000))
    assert made == list(arithmetic.problems(30_000))
    for key, text in made:
        lines = text.split("\n")
        assert len(lines) == 40
        assert {split_of(line) for line in lines} == {split_of(key)}
        for line in lines:
            left, equals, right = line.partition(" = ")
            if equals and left[0].isdigit() and "x" not in left:
                expression = left.replace("^", "**").replace("/", "//")
                assert eval(expression) == int(right)


def test_cleaning_drops_repeats_english_leftovers_and_release_notes() -> None:
    english = frozenset({"This paragraph was never translated."})
    text = "\n".join(
        [
            "Beispiel:",
            "Dieser Absatz steht zweimal im Text.",
            "Dieser Absatz steht zweimal im Text.",
            "This paragraph was never translated.",
            "Verfügbar seit LibreOffice Version 7.2",
            "Beispiel:",
        ]
    )
    kept = build._clean(text, "de", set(), english)
    assert kept == "Beispiel:\nDieser Absatz steht zweimal im Text.\nBeispiel:"
    latin = "Only Latin letters in this one, no Chinese."
    assert build._clean(latin, "zh", set(), frozenset()) == ""
    assert build._clean(latin, "de", set(), frozenset()) == latin


def test_the_command_builds_from_the_packages_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "work/unpacked/libreoffice-help-en-us/usr/share/libreoffice/help/en-US/text"
    page.mkdir(parents=True)
    words = "<p>" + "Some words about saving a file in many steps. " * 5 + "</p>"
    (page / "a.html").write_text(f'<html><body><div id="DisplayArea">{words}</div></body></html>')
    (tmp_path / "work/libreoffice-help-en-us_4%3a7.4.7-1_all.deb").touch()
    plan = [s for s in build.PLAN if s.name == "arithmetic" or s.package.endswith("en-us")]
    monkeypatch.setattr(build, "PLAN", tuple(plan))
    out = tmp_path / "out"
    assert main(["--work", str(tmp_path / "work"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "| en | libreoffice-help | libreoffice-help-en-us | 4:7.4.7-1 | MPL-2.0 | 1 |" in printed
    assert [d.key for d in documents("en", split_of("office/a"), out)] == ["office/a"]
    total = sum(len(d.text) for split in ("train", "heldout") for d in documents("num", split, out))
    assert 990_000 < total < 1_110_000


def test_a_package_that_cannot_be_fetched_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(100, command, stderr="E: Unable to locate\n")

    monkeypatch.setattr(subprocess, "run", fail)
    assert main(["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "`apt-get download libreoffice-help-en-us` failed (E: Unable to locate)" in error


def test_a_machine_without_the_tool_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(ConfigError, match="`npm` is missing on this machine"):
        packages.unpack("chinese-poetry", tmp_path)


def test_only_the_wanted_poems_are_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "chinese-poetry-2.0.1.tgz"
    with tarfile.open(archive, "w:gz") as files:
        for name in (
            "LICENSE",
            "dist/quantangshi/poet.tang.0.json",
            "dist/quantangshi/poet.song.0.json",
        ):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = 2
            files.addfile(member, io.BytesIO(b"[]"))
    folder = packages.unpack("chinese-poetry", tmp_path)
    found = sorted(path.name for path in folder.rglob("*") if path.is_file())
    assert found == ["LICENSE", "poet.tang.0.json"]
    assert packages.package_version("chinese-poetry", tmp_path) == "2.0.1"
    assert packages.package_version("sword-text-web", tmp_path) == "not downloaded"


def _write_sword(folder: Path, blocks: list[bytes]) -> None:
    module = folder / "usr/share/sword/modules/texts/ztext/bible"
    module.mkdir(parents=True)
    index, offset = b"", 0
    for block in blocks:
        index += struct.pack("<III", offset, len(block), 0)
        offset += len(block)
    (module / "nt.bzs").write_bytes(index)
    (module / "nt.bzz").write_bytes(b"".join(blocks))


def _write_novels(folder: Path, lines: list[str], kind: str) -> None:
    data = b"X\n" + struct.pack(">iii", 2, 0, 0) + struct.pack(">ii", 16, len(lines))
    for line in lines:
        text = line.encode()
        data += struct.pack(">ii", 0x00040009, len(text)) + text
    if kind == "Z":
        packed = b"Z" + lzma.compress(data, format=lzma.FORMAT_RAW, filters=novels.LZMA2)
    else:
        packed = zlib.compress(data)
    block = struct.pack(">I", len(data)) + packed
    target = folder / "usr/lib/R/site-library/janeaustenr/data"
    target.mkdir(parents=True)
    (target / "Rdata.rdb").write_bytes(block)
    index = b"\x00\x00\x00\x0d\x00\x00\x00\x02" + struct.pack(">II", 0, len(block))
    (target / "Rdata.rdx").write_bytes(zlib.compress(index))
