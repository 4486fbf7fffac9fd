"""Downloading: into the user's cache, with progress and a checksum, whole or not at all."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pooch  # type: ignore[import-untyped]
from requests import exceptions
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from onlinenorm.experiments.errors import ExperimentError

RETRIES = 2  # a second's pause before the first, two before the next
TIMEOUT = 20  # seconds without a byte
CHUNK = 2**16  # bytes


@dataclass(frozen=True)
class Remote:
    """A published file."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        """Of the file."""
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Source:
    """Where a data set is published.

    Attributes:
        title: its name.
        directory: its own within the cache.
        remotes: its files.
        package: of Debian, that has it too.
    """

    title: str
    directory: str
    remotes: tuple[Remote, ...]
    package: str | None = None

    def how_to_get(self, folder: Path) -> str:
        """What to do for want of its files: the addresses, the directory and the command."""
        command = ["curl", "--fail", "--location", "--create-dirs", "--output-dir", str(folder), "--remote-name-all"]
        package = f"On Debian and Ubuntu: sudo apt install {self.package}\n" if self.package else ""
        return (
            f"{package}This puts it where it is looked for; if done elsewhere, give the directory with --data DIR:\n"
            f"  {shlex.join([*command, *(remote.url for remote in self.remotes)])}"
        )


def fetch(source: Source) -> Path:
    """Download what is not in the cache yet.

    Returns:
        The data set's directory, which has all of its files, each with the right checksum.

    Raises:
        ExperimentError: a file can't be had; what was downloaded of it is deleted.
    """
    folder = Path(pooch.os_cache("onlinenorm")) / source.directory
    cache = pooch.create(
        folder,
        base_url="",
        registry={remote.name: f"sha256:{remote.sha256}" for remote in source.remotes},
        urls={remote.name: remote.url for remote in source.remotes},
        retry_if_failed=RETRIES,
    )
    pooch.get_logger().setLevel("WARNING")  # the bars say what it does
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        for remote in source.remotes:
            downloader = pooch.HTTPDownloader(
                progressbar=_Bar(progress, remote.name),
                chunk_size=CHUNK,
                timeout=TIMEOUT,
                headers={"Accept-Encoding": "identity"},  # as it is, or progress and checksum are of something else
            )
            try:
                cache.fetch(remote.name, downloader=downloader)
            except (OSError, ValueError) as error:
                raise ExperimentError(
                    f"{source.title} could not be downloaded: {_reason(error, remote, folder)}.\n"
                    f"{source.how_to_get(folder)}"
                ) from error
    return folder


def _reason(error: Exception, remote: Remote, folder: Path) -> str:
    host = urlsplit(remote.url).netloc
    if isinstance(error, exceptions.HTTPError) and error.response is not None:
        return f"{host} answers {error.response.status_code} {error.response.reason} for {remote.url}"
    if isinstance(error, exceptions.ChunkedEncodingError):
        return f"the connection to {host} broke before the end of {remote.url}"
    if isinstance(error, exceptions.RequestException):
        return f"{host} cannot be reached for {remote.url}"
    if isinstance(error, OSError):
        return f"cannot write {remote.name} into {folder}: {error.strerror or error}"
    return f"what {remote.url} gives is not the published file, as its checksum says"


class _Bar:
    """A progress bar with the methods that pooch calls, drawn by Rich once there is something to download."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._name = name
        self._task: TaskID | None = None

    @property
    def total(self) -> float:
        """Bytes to come; set at the beginning of every attempt."""
        return self._progress.tasks[self._begun].total or 0

    @total.setter
    def total(self, total: int) -> None:
        self._progress.reset(self._begun, total=total)

    def update(self, count: int) -> None:
        """So many more bytes are here."""
        self._progress.advance(self._begun, count)

    def reset(self) -> None:
        """Begin again; pooch then counts the whole file at once, as it counts in chunks before."""
        self._progress.update(self._begun, completed=0)

    def close(self) -> None:
        """The file is here."""

    @property
    def _begun(self) -> TaskID:
        if self._task is None:
            self._task = self._progress.add_task(self._name)
        return self._task
