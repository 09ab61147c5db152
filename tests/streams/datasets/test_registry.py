"""Data sets: found, verified, and fetched from a local server that breaks off, lies, or is not there."""

import contextlib
import dataclasses
import fcntl
import hashlib
import http.server
import os
import socket
import threading

import pytest
import tyro

from metaleader.cli.data import data as data_command
from metaleader.streams import make_stream
from metaleader.streams.datasets import registry as data
from metaleader.system import download

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT; each request takes the next behaviour from a list, the last one stays."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours = ["whole"]
        self.ranges = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/file"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self):
        behaviours = self.server.behaviours
        behaviour = behaviours.pop(0) if len(behaviours) > 1 else behaviours[0]
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if isinstance(behaviour, int):
            self.send_error(behaviour)
            return
        content = {"changed": b"x" * len(CONTENT), "longer": CONTENT + b"more"}.get(behaviour, CONTENT)
        if behaviour == "no ranges":
            start = 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        body = content[start:]
        if behaviour == "breaks off":
            body = body[: len(CONTENT) // 4]
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)
        if behaviour == "breaks off":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def log_message(self, format, *args): ...


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "_PAUSE", 0.0)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def publish(server, monkeypatch):
    def put(sha256=SHA256, urls=None):
        file = data.DataFile("file", len(CONTENT), sha256, urls or (server.url,))
        monkeypatch.setitem(data.DATA_SETS, "mnist", data.DataSet((file,), None, "rainbow-digits"))

    put()
    return put


def files(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_fetching(publish, server, tmp_path):
    steps = []
    assert data.fetch("mnist", tmp_path, lambda *step: steps.append(step)) == tmp_path / "mnist"
    assert files(tmp_path) == {"file": CONTENT}
    assert steps[0] == ("file", 0, len(CONTENT))
    assert steps[-1] == ("file", len(CONTENT), len(CONTENT))
    assert [here for _, here, _ in steps] == sorted(here for _, here, _ in steps)
    data.fetch("mnist", tmp_path)
    assert len(server.ranges) == 1  # what is here and verified is not fetched again
    (tmp_path / "mnist" / "file").write_bytes(b"damaged")
    assert data.status("mnist", tmp_path).state == "damaged"
    data.fetch("mnist", tmp_path)
    assert files(tmp_path) == {"file": CONTENT}


def test_a_broken_off_transfer_goes_on_where_it_stopped(publish, server, tmp_path):
    server.behaviours = ["breaks off", "breaks off", "whole"]
    data.fetch("mnist", tmp_path)
    quarter = len(CONTENT) // 4
    assert server.ranges == ["bytes=0-", f"bytes={quarter}-", f"bytes={2 * quarter}-"]
    assert files(tmp_path) == {"file": CONTENT}


def test_a_later_call_resumes(publish, server, tmp_path):
    server.behaviours = ["breaks off", 503]
    with pytest.raises(OSError, match=r"503.*0.3 MB of 1.0 MB are kept: run the command again to resume"):
        data.fetch("mnist", tmp_path)
    assert list(files(tmp_path)) == ["file.part"]  # nothing under the final name
    assert data.status("mnist", tmp_path).state == "missing"
    server.behaviours = ["whole"]
    data.fetch("mnist", tmp_path)
    assert server.ranges[-1] == f"bytes={len(CONTENT) // 4}-"
    assert files(tmp_path) == {"file": CONTENT}


def test_a_transfer_that_finishes_at_the_last_attempt(publish, server, tmp_path):
    server.behaviours = ["breaks off"]
    data.fetch("mnist", tmp_path)
    assert len(server.ranges) == 4
    assert files(tmp_path) == {"file": CONTENT}


def test_a_server_that_cannot_resume(publish, server, tmp_path):
    server.behaviours = ["breaks off", "no ranges"]
    data.fetch("mnist", tmp_path)
    assert files(tmp_path) == {"file": CONTENT}


def test_a_part_of_another_file_is_replaced(publish, tmp_path):
    (tmp_path / "mnist").mkdir()
    for part in (b"of something else", b"x" * len(CONTENT), b"x" * (len(CONTENT) + 1)):
        (tmp_path / "mnist" / "file.part").write_bytes(part)
        data.fetch("mnist", tmp_path)
        assert files(tmp_path) == {"file": CONTENT}
        (tmp_path / "mnist" / "file").unlink()


@pytest.mark.parametrize("behaviour", ["changed", "longer"])
def test_a_wrong_checksum_leaves_nothing(behaviour, publish, server, tmp_path):
    server.behaviours = [behaviour]
    with pytest.raises(OSError, match=r"is not the published file \(SHA-256|sends more than"):
        data.fetch("mnist", tmp_path)
    assert files(tmp_path) == {}


def test_the_next_address_is_tried(publish, server, tmp_path):
    publish(urls=(server.url, server.url))
    server.behaviours = [404, "whole"]
    data.fetch("mnist", tmp_path)
    assert files(tmp_path) == {"file": CONTENT}


def test_not_found(publish, server, tmp_path):
    server.behaviours = [404]
    with pytest.raises(OSError, match=r"could not fetch file: http://127.0.0.1:\d+/file: HTTP Error 404"):
        data.fetch("mnist", tmp_path)
    assert files(tmp_path) == {}
    assert len(server.ranges) == 1


def test_no_network(publish, server, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        publish(urls=(f"http://127.0.0.1:{unused.getsockname()[1]}/file",))
        with pytest.raises(OSError, match=r"the connection failed .*refused.* after 5 attempts"):
            data.fetch("mnist", tmp_path)
    assert files(tmp_path) == {}


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/full"), lambda path: path.mkdir()])
def test_a_part_that_is_not_a_file_is_refused(make, publish, tmp_path):
    (tmp_path / "mnist").mkdir()
    make(tmp_path / "mnist" / "file.part")
    with pytest.raises(OSError, match=r"file.part is not a regular file; remove it"):
        data.fetch("mnist", tmp_path)


def test_a_link_is_not_followed(publish, tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "mnist" / "file.part").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"file.part is not a regular file; remove it"):
        data.fetch("mnist", tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"
    (tmp_path / "mnist" / "file.part").unlink()
    (tmp_path / "mnist" / "file").symlink_to(tmp_path / "precious")
    data.fetch("mnist", tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "mnist" / "file").read_bytes() == CONTENT


def test_a_disk_that_fills_up_on_the_way(publish, tmp_path, monkeypatch):
    def write(part, chunk):
        if part.tell() > 300_000:
            raise OSError(28, "No space left on device")
        part.write(chunk)

    monkeypatch.setattr(download, "_write", write)
    with pytest.raises(OSError, match="no space left for file"):
        data.fetch("mnist", tmp_path)
    assert files(tmp_path) == {}


def test_a_folder_that_cannot_be_made(publish, tmp_path):
    (tmp_path / "mnist").write_text("a file")
    with pytest.raises(OSError, match="exists"):
        data.fetch("mnist", tmp_path)


def test_two_at_once(publish, tmp_path):
    (tmp_path / "mnist").mkdir()
    with (tmp_path / "mnist" / "file.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process is fetching"):
            data.fetch("mnist", tmp_path)
    data.fetch("mnist", tmp_path)
    assert files(tmp_path) == {"file": CONTENT}


def test_where_data_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("METALEADER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data.data_folder() == tmp_path / "cache" / "metaleader" / "data"
    monkeypatch.setenv("METALEADER_DATA", str(tmp_path / "sets"))
    assert data.data_folder() == tmp_path / "sets"
    assert data.data_folder(tmp_path / "given") == tmp_path / "given"


def test_status(publish, tmp_path):
    assert data.status("mnist", tmp_path) == data.Status(tmp_path / "mnist", "missing", "file")
    data.fetch("mnist", tmp_path)
    assert data.status("mnist", tmp_path).state == "verified"
    assert data.status("cifar100", tmp_path).detail == "cifar-100-python.tar.gz or cifar100.npz"
    (tmp_path / "cifar100").mkdir()
    (tmp_path / "cifar100" / "cifar100.npz").write_bytes(b"12345")
    assert data.status("cifar100", tmp_path).state == "present"
    with pytest.raises(ValueError, match="unknown data set 'minst'"):
        data.status("minst")
    with pytest.raises(ValueError, match=r"pascal3d cannot be fetched into .*: put the folder CAD of the PASCAL3D\+"):
        data.fetch("pascal3d", tmp_path)


def test_objects_as_one_file_or_as_the_official_folder(tmp_path, monkeypatch):
    assert data.status("pascal3d", tmp_path).detail == "pascal3d_cad.npz or .off files"
    car = tmp_path / "pascal3d" / "CAD" / "car" / "01.off"
    car.parent.mkdir(parents=True)
    car.write_text("OFF")
    assert data.find("pascal3d", tmp_path) == [car]
    here = data.status("pascal3d", tmp_path)
    assert (here.state, here.detail) == ("present", "1 .off files, no published checksum")
    archive = tmp_path / "pascal3d" / "pascal3d_cad.npz"
    archive.write_bytes(CONTENT)
    assert data.find("pascal3d", tmp_path) == [archive]
    here = data.status("pascal3d", tmp_path)
    assert (here.state, here.detail) == ("present", f"pascal3d_cad.npz, 1.0 MB, not the known file (SHA-256 {SHA256})")
    known = dataclasses.replace(data.DATA_SETS["pascal3d"], sha256=SHA256)
    monkeypatch.setitem(data.DATA_SETS, "pascal3d", known)
    assert data.status("pascal3d", tmp_path).state == "verified"


def test_missing_data_names_the_command_and_what_works_without(tmp_path):
    for stream, name in (("rainbow-mnist", "mnist"), ("cifar100", "cifar100")):
        with pytest.raises(FileNotFoundError, match=rf"`metaleader data fetch {name}`.*use rainbow-digits"):
            make_stream(stream, data=tmp_path)


def test_a_mistyped_stream():
    with pytest.raises(ValueError, match=r"unknown stream 'rainbow_digit'; did you mean 'rainbow-digits'\?"):
        make_stream("rainbow_digit")
    with pytest.raises(ValueError, match="unknown stream 'xyz'; the names are rainbow-digits"):
        make_stream("xyz")


def test_the_command(publish, tmp_path, capsys):
    def run(*arguments):
        return tyro.cli(data_command, args=[*arguments, "--data", str(tmp_path)])

    assert run() == 0
    listed = capsys.readouterr().out
    assert f"mnist     missing   {tmp_path / 'mnist'}: file\n" in listed
    assert "mnist: run `metaleader data fetch mnist`; without it, use rainbow-digits" in listed
    assert "pascal3d: put the folder CAD of the PASCAL3D+ release (https://cvgl.stanford.edu" in listed
    assert run("fetch", "mnist") == 0
    assert capsys.readouterr().out == f"mnist is in {tmp_path / 'mnist'}, verified\n"
    assert run() == 0
    assert "mnist     verified" in capsys.readouterr().out
    (tmp_path / "mnist" / "file").write_bytes(b"other")
    assert run("list") == 1
    assert "damaged" in capsys.readouterr().out
    with pytest.raises(ValueError, match="mnist or cifar100"):
        run("fetch")
    with pytest.raises(ValueError, match="did you mean `metaleader data fetch mnist`"):
        run("list", "mnist")


def test_the_published_checksums_have_the_right_form():
    for data_set in data.DATA_SETS.values():
        for file in data_set.files:
            assert len(bytes.fromhex(file.sha256)) == 32
            assert all(url.startswith("https://") and url.endswith(file.name) for url in file.urls)
