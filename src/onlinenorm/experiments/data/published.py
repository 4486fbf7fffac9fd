"""Data sets in the forms that they are published in: an archive, or the directory that it unpacks to."""

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from onlinenorm.experiments.data.fetch import Source
from onlinenorm.experiments.errors import ExperimentError


@dataclass(frozen=True)
class Form:
    """One form that a data set is published in.

    Attributes:
        archive: its file name.
        directory: where its files lie once it is unpacked.
        files: their names.
    """

    archive: str
    directory: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """A data set in one of its forms.

    Attributes:
        form: the form.
        place: the directory that has its files, or its archive.
    """

    form: Form
    place: Path

    def read(self) -> dict[str, bytes]:
        """The content of every file, by name, in the form's order."""
        if self.place.is_dir():
            return {name: read_file(self.place / name) for name in self.form.files}
        content = _unpack(self.place, self.form.files)
        for name in self.form.files:
            if name not in content:
                raise ExperimentError(f"There is no {name} in {self.place}. Get the archive again.")
        return {name: content[name] for name in self.form.files}

    def where(self, name: str) -> str:
        """A file's path, for messages."""
        return str(self.place / name) if self.place.is_dir() else f"{name} in {self.place}"


def find(source: Source, folder: Path, forms: Sequence[Form]) -> Found:
    """Look for a data set's files in a directory, in the directories that its archives unpack to, then for archives.

    Args:
        source: of the data set.
        folder: the directory, or an archive.
        forms: of the data set; the first that is there is taken.
    """
    for form in forms:
        for place in (folder, folder / form.directory):
            if any((place / name).is_file() for name in form.files):
                return Found(form, place)
    for form in forms:
        for place in (folder, folder / form.archive):
            if place.name == form.archive and place.is_file():
                return Found(form, place)
    wanted = ", ".join(name for form in forms for name in (form.archive, f"{form.directory}/"))
    raise missing(source, folder, f"one of {wanted}")


def missing(source: Source, folder: Path, wanted: str) -> ExperimentError:
    """The error that a directory does not have a data set."""
    there = f"There is no {source.title} in {folder}" if folder.exists() else f"{folder} does not exist"
    return ExperimentError(f"{there}: wanted is {wanted}.\n{source.how_to_get(folder)}")


def read_file(path: Path) -> bytes:
    """A file's content, which is decompressed if its name ends in .gz."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise corrupt(str(path), str(error)) from error
    except OSError as error:
        raise ExperimentError(f"Cannot read {path}: {error.strerror}.") from error


def corrupt(where: str, why: str) -> ExperimentError:
    """The error that a file is not what was published."""
    return ExperimentError(f"{where} is truncated or corrupt: {why}. Get it again.")


def _unpack(archive: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The content of some of an archive's files. The archive is read to its end, so that its checksum is looked at."""
    content = {}
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as members:
                for path in members.namelist():
                    if (name := PurePosixPath(path).name) in names:
                        content[name] = members.read(path)
            return content
        with gzip.open(archive) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as members_in_turn:
                for member in members_in_turn:
                    if (name := PurePosixPath(member.name).name) in names and (
                        file := members_in_turn.extractfile(member)
                    ):
                        content[name] = file.read()
            while stream.read(2**20):
                pass
        return content
    except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, RuntimeError) as error:
        # zipfile's RuntimeError is that it does not know the compression, or wants a password: the flags are broken
        raise corrupt(str(archive), str(error)) from error
    except OSError as error:
        raise ExperimentError(f"Cannot read {archive}: {error.strerror}.") from error
