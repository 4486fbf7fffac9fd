import hashlib
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from onlinenorm.experiments.data import fetch as module
from onlinenorm.experiments.data.fashion_mnist import fashion_mnist
from onlinenorm.experiments.data.fetch import Remote, Source, fetch
from onlinenorm.experiments.errors import ExperimentError

CONTENT = bytes(range(256)) * 2000  # half a megabyte: several chunks


@dataclass
class Site:
    """A web server of this machine. `answers` are how it treats one request after the other; the last one repeats."""

    answers: list = field(default_factory=lambda: ["whole"])
    asked: list = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def __enter__(self):
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                site.asked.append(self.path)
                answer = site.answers[min(len(site.asked), len(site.answers)) - 1]
                if answer == "absent":
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(CONTENT)))
                self.end_headers()
                content = {
                    "broken off": CONTENT[:300_000],
                    "slow": CONTENT[:300_000],
                    "altered": CONTENT[:-1] + b"x",
                }.get(answer, CONTENT)
                self.wfile.write(content)
                if answer == "slow":
                    site.left.wait()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.host = f"127.0.0.1:{self.server.server_port}"
        return self

    def __exit__(self, *_):
        self.left.set()
        self.server.shutdown()
        self.server.server_close()

    def source(self, *names):
        sha256 = hashlib.sha256(CONTENT).hexdigest()
        return Source("Example", "example", tuple(Remote(f"http://{self.host}/{name}", sha256) for name in names))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The cache of a user who has none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(module, "RETRIES", 0)
    return tmp_path / "cache" / "onlinenorm" / "example"


def fails(source, cache):
    """What is said when a download fails, which leaves nothing that is taken for the file."""
    with pytest.raises(ExperimentError) as caught:
        fetch(source)
    assert list(cache.iterdir() if cache.exists() else ()) == []
    said = str(caught.value)
    assert said.startswith("Example could not be downloaded: ")
    assert f"--output-dir {cache}" in said
    assert "curl" in said
    assert all(remote.url in said for remote in source.remotes)
    return said


def test_downloads_once(cache, capsys):
    with Site() as site:
        assert fetch(site.source("a.gz", "b.gz")) == cache
        assert [path.read_bytes() for path in sorted(cache.iterdir())] == [CONTENT, CONTENT]
        shown = capsys.readouterr().err
        assert "a.gz" in shown
        assert "512.0/512.0 kB" in shown
        fetch(site.source("a.gz", "b.gz"))
        assert site.asked == ["/a.gz", "/b.gz"]
    assert fetch(site.source("a.gz")) == cache, "the network is not asked again"


def test_a_file_damaged_since_is_replaced(cache):
    with Site() as site:
        fetch(site.source("a.gz"))
        (cache / "a.gz").write_bytes(CONTENT[:1000])
        fetch(site.source("a.gz"))
        assert (cache / "a.gz").read_bytes() == CONTENT


def test_an_interrupted_download(cache):
    with Site(["broken off"]) as site:
        assert f"the connection to {site.host} broke before the end of http://{site.host}/a.gz" in fails(
            site.source("a.gz"), cache
        )


def test_an_interrupted_download_is_tried_again(cache, monkeypatch):
    monkeypatch.setattr(module, "RETRIES", 1)
    with Site(["broken off", "whole"]) as site:
        fetch(site.source("a.gz"))
        assert site.asked == ["/a.gz", "/a.gz"]
    assert (cache / "a.gz").read_bytes() == CONTENT


def test_what_came_before_an_interruption_is_kept(cache):
    with Site(["whole", "broken off", "whole"]) as site:
        source = site.source("a.gz", "b.gz")
        with pytest.raises(ExperimentError, match=r"broke before the end of .*b\.gz"):
            fetch(source)
        assert [path.name for path in cache.iterdir()] == ["a.gz"]
        fetch(source)
        assert site.asked == ["/a.gz", "/b.gz", "/b.gz"]


def test_another_file_than_was_published(cache):
    with Site(["altered"]) as site:
        assert f"what http://{site.host}/a.gz gives is not the published file" in fails(site.source("a.gz"), cache)


def test_a_file_that_is_gone(cache):
    with Site(["absent"]) as site:
        assert f"{site.host} answers 404 Not Found" in fails(site.source("a.gz"), cache)


def test_no_connection(cache):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    source = Source("Example", "example", (Remote(f"http://127.0.0.1:{port}/a.gz", "0"),))
    assert f"127.0.0.1:{port} cannot be reached for http://127.0.0.1:{port}/a.gz" in fails(source, cache)


def test_no_such_host(cache):
    source = Source("Example", "example", (Remote("http://nowhere.invalid/a.gz", "0"),))
    assert "nowhere.invalid cannot be reached" in fails(source, cache)


def test_a_cache_that_cannot_be_made(cache):
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file in its place")
    with Site() as site, pytest.raises(ExperimentError, match=f"cannot write a.gz into {cache}: "):
        fetch(site.source("a.gz"))


# In a process of its own

PROGRAM = """
import resource, sys
from onlinenorm.experiments.data.fetch import Remote, Source, fetch
from onlinenorm.experiments.errors import ExperimentError
if limit := int(sys.argv[3]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    fetch(Source("Example", "example", (Remote(sys.argv[1], sys.argv[2]),)))
except ExperimentError as error:
    sys.exit(f"{type(error).__name__} {error}")
"""
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits and signals")


def start(source, limit=0):
    (remote,) = source.remotes
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, remote.url, remote.sha256, str(limit)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@posix
def test_a_full_disk(cache):
    """A limit on the size of files stands in for it: the system refuses to write in the same way."""
    with Site() as site, start(site.source("a.gz"), limit=200_000) as process:
        said = " ".join(process.communicate(timeout=60)[1].split())
    assert process.returncode == 1
    assert f"ExperimentError Example could not be downloaded: cannot write a.gz into {cache}: File too large" in said
    assert "--data DIR" in said
    assert list(cache.iterdir()) == []


@posix
def test_killed_in_the_middle(cache):
    with Site(["slow", "whole"]) as site:
        source = site.source("a.gz")
        with start(source) as process:
            deadline = time.monotonic() + 60
            while not any(path.stat().st_size for path in (cache.iterdir() if cache.exists() else ())):
                assert time.monotonic() < deadline, "nothing was downloaded"
                time.sleep(0.02)
            process.kill()
        assert not (cache / "a.gz").exists()
        fetch(source)
    assert (cache / "a.gz").read_bytes() == CONTENT


def test_data_sets_download_where_no_directory_is_given(monkeypatch, tmp_path):
    with Site(["absent"]) as site:
        monkeypatch.setattr("onlinenorm.experiments.data.fashion_mnist.DEBIAN", Path(tmp_path / "not installed"))
        monkeypatch.setattr(
            "onlinenorm.experiments.data.fashion_mnist.SOURCE", site.source("train-images-idx3-ubyte.gz")
        )
        with pytest.raises(ExperimentError, match="answers 404"):
            fashion_mnist(None)
        assert site.asked == ["/train-images-idx3-ubyte.gz"]
