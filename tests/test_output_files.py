"""Files that are written by name (--save, --save-start, --out): links, other things than files, modes, full disks, and
reports of several files."""

import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_ops.__main__ import main
from cuda_ops._files import check_writable, write_file, write_files

QUICK = ["mnist", "--device", "cpu", "--backend", "native", "--limit", "64", "--batch-size", "32", "--epochs", "1"]


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    """Sets the umask for a test; gives what sets it."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def test_links_are_followed(tmp_path):
    (tmp_path / "there").mkdir()
    target, link, second = tmp_path / "there" / "weights", tmp_path / "link", tmp_path / "second"
    target.write_bytes(b"old")
    link.symlink_to("there/weights")
    second.symlink_to(link)
    write_file(second, b"new")
    assert target.read_bytes() == b"new"
    assert link.is_symlink() and second.is_symlink()
    assert os.listdir(tmp_path / "there") == ["weights"]
    target.unlink()  # a link to what is not there yet is followed as well
    write_file(link, b"again")
    assert target.read_bytes() == b"again" and link.is_symlink()


def test_a_link_to_itself_is_told(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: .*loop"):
        write_file(tmp_path / "loop", b"")


@pytest.mark.parametrize("bits", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_that_the_umask_leaves(bits, umask, tmp_path):
    umask(bits)
    write_file(tmp_path / "new", b"")
    assert mode(tmp_path / "new") == 0o666 & ~bits


def test_an_old_file_keeps_its_mode(umask, tmp_path):
    path = tmp_path / "old"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write_file(path, b"new")
    assert (path.read_bytes(), mode(path)) == (b"new", 0o640)


def no_files(folder):
    """Things that are no files, by what they are called."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.close()
    (folder / "link").symlink_to("pipe")
    return {
        "folder": folder / "folder",
        "named pipe": folder / "pipe",
        "socket": folder / "socket",
        "device": Path("/dev/null"),
        "named pipe ": folder / "link",
    }


def test_what_is_no_file_is_refused_by_name(tmp_path):
    for kind, path in no_files(tmp_path).items():
        before = os.lstat(path)
        for refusing in (check_writable, lambda path: write_file(path, b"new")):
            with pytest.raises(OSError, match=f"it is a {kind.strip()}, not a regular file") as error:
                refusing(path)
            assert error.value.filename == str(path)
        after = os.lstat(path)
        assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe", "socket"]


def test_a_write_protected_file_is_refused(tmp_path, monkeypatch):
    if os.geteuid() == 0:  # who may write to all files
        monkeypatch.setattr(os, "access", lambda path, how: how != os.W_OK)
    path = tmp_path / "kept"
    path.write_bytes(b"old")
    path.chmod(0o444)
    with pytest.raises(PermissionError, match="kept"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"


def test_checking_leaves_nothing(tmp_path):
    check_writable(tmp_path / "new")
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError, match="none/new"):
        check_writable(tmp_path / "none" / "new")


def test_names_as_long_as_they_can_be(tmp_path):
    path = tmp_path / ("x" * 255)
    write_file(path, b"new")
    assert path.read_bytes() == b"new"


# A limit on the size of files stands for a disk that is full: the write itself fails, in the middle of a file.
LIMITED = f"""
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from cuda_ops._files import write_files
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
folder = Path(sys.argv[1])
write_files({{folder / "small": b"x" * 900, folder / "large": b"x" * 1001}})
"""


def test_a_full_disk_is_told_by_the_file_that_it_hit_and_none_is_written(tmp_path):
    (tmp_path / "small").write_bytes(b"old")
    result = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True)
    assert result.returncode == 1
    assert f"File too large: '{tmp_path}/large'" in result.stderr
    assert os.listdir(tmp_path) == ["small"]
    assert (tmp_path / "small").read_bytes() == b"old"


def test_several_files_or_none(tmp_path):
    os.mkfifo(tmp_path / "third")
    with pytest.raises(OSError, match="third"):
        write_files({tmp_path / name: b"" for name in ("first", "second", "third")})
    assert os.listdir(tmp_path) == ["third"]


def test_an_interrupt_between_two_renames_leaves_no_drafts(tmp_path, monkeypatch):
    replace = os.replace

    def interrupted(*arguments):
        if (tmp_path / "first").exists():
            signal.raise_signal(signal.SIGINT)
        replace(*arguments)

    monkeypatch.setattr(os, "replace", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what was started in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            write_files({tmp_path / name: b"" for name in ("first", "second")})
    finally:
        signal.signal(signal.SIGINT, before)
    assert os.listdir(tmp_path) == ["first"]


# The command


def refused(capsys, tmp_path, *options):
    assert main([*QUICK, "--out", str(tmp_path / "out"), *map(str, options)]) == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert output.out == ""
    return output.err


@pytest.mark.parametrize("option", ["--save", "--save-start"])
def test_the_command_refuses_what_is_no_file_before_it_trains(option, tmp_path, capsys):
    for kind, path in no_files(tmp_path).items():
        error = refused(capsys, tmp_path, option, path)
        assert re.search(rf"{option}:? {path}.* is a {kind.strip()}", error), error
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe", "socket"]


def test_the_command_refuses_a_report_in_the_place_of_something_else(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "report.md")
    error = refused(capsys, tmp_path)
    assert f"--out: {tmp_path}/out/report.md cannot be written (it is a named pipe" in error
    assert os.listdir(tmp_path / "out") == ["report.md"]


def test_two_options_cannot_name_one_file(tmp_path, capsys):
    (tmp_path / "link").symlink_to("weights")
    error = refused(capsys, tmp_path, "--save", tmp_path / "weights", "--save-start", tmp_path / "link")
    assert "--save-start" in error and "is written by --save too" in error
    error = refused(capsys, tmp_path, "--save", tmp_path / "out" / ".." / "out" / "report.md")
    assert "there is no folder" in error  # it would be made only now
    (tmp_path / "out").mkdir()
    error = refused(capsys, tmp_path, "--save", tmp_path / "out" / "report.md")
    assert "is written by --save too" in error


def test_the_command_follows_links_and_honours_the_umask(tmp_path, umask):
    umask(0o027)
    (tmp_path / "real").mkdir()
    for name in ("out", "weights.pt", "start.bin"):
        (tmp_path / name).symlink_to(f"real/{name}")
    (tmp_path / "real" / "out").mkdir()
    outputs = ["--save", tmp_path / "weights.pt", "--save-start", tmp_path / "start.bin", "--out", tmp_path / "out"]
    assert main([*QUICK, *map(str, outputs)]) == 0
    files = {path.name: path for path in (tmp_path / "real").rglob("*") if path.is_file()}
    assert sorted(files) == ["report.json", "report.md", "report.png", "start.bin", "weights.pt"]
    assert {mode(path) for path in files.values()} == {0o640}
    assert all((tmp_path / name).is_symlink() for name in ("out", "weights.pt", "start.bin"))


REPORT = ["report.json", "report.md", "report.png"]


@pytest.mark.parametrize("limit, file, left", [(100_000, "out/report.png", []), (1_000_000, "weights.pt", REPORT)])
def test_the_command_tells_which_file_did_not_fit(limit, file, left, tmp_path):
    """And the report is there whole, or not at all."""
    command = [sys.executable, "-m", "cuda_ops", *QUICK, "--out", tmp_path / "out", "--save", tmp_path / "weights.pt"]
    result = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 2
    assert result.stderr == f"python -m cuda_ops mnist: error: {tmp_path}/{file} cannot be written: File too large\n"
    assert not (tmp_path / "weights.pt").exists()
    assert sorted(os.listdir(tmp_path / "out")) == left
