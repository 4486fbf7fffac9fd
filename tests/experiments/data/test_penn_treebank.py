import hashlib
import io
import tarfile
import zipfile
from dataclasses import replace

import pytest

from onlinenorm.experiments.data.fetch import Remote
from onlinenorm.experiments.data.penn_treebank import SOURCE, penn_treebank, read
from onlinenorm.experiments.errors import ExperimentError

TEXTS = {
    "ptb.train.txt": " mr. <unk> is chairman of <unk> n.v. the dutch group \n N years old \n",
    "ptb.valid.txt": " <unk> group is old \n",
    "ptb.test.txt": " N years of <unk> \n the chairman \n",
}
SMALL = replace(
    SOURCE,
    remotes=tuple(Remote(f"http://x/{name}", hashlib.sha256(t.encode()).hexdigest()) for name, t in TEXTS.items()),
)


def loose(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in TEXTS.items():
        (folder / name).write_text(text)


def mikolovs_archive(path):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {"README": "?", **TEXTS, "ptb.char.train.txt": "m r ."}.items():
            member = tarfile.TarInfo(f"./simple-examples/data/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


def zipped(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in reversed(TEXTS.items()):
            archive.writestr(name, text)
            archive.writestr(f"__MACOSX/._{name}", b"\0\5\26\7")


LAYOUTS = {
    "texts": loose,
    "unpacked": lambda folder: loose(folder / "simple-examples" / "data"),
    "simple-examples.tgz": lambda folder: mikolovs_archive(folder / "simple-examples.tgz"),
    "ptb.zip": lambda folder: zipped(folder / "ptb.zip"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_the_texts(tmp_path, layout):
    LAYOUTS[layout](tmp_path)
    text = read(SMALL, tmp_path)
    for indices, content in zip((text.train, text.validation, text.test), TEXTS.values(), strict=True):
        assert [text.vocabulary[i] for i in indices] == content.replace("\n", "<eos>").split()
    assert len(set(text.vocabulary)) == len(text.vocabulary) == 13


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kept", [0, 0.5, 0.99])
def test_a_truncated_text_is_named(tmp_path, name, kept):
    loose(tmp_path)
    (tmp_path / name).write_text(TEXTS[name][: int(kept * len(TEXTS[name]))])
    with pytest.raises(ExperimentError, match=f"{tmp_path / name} is truncated or corrupt"):
        read(SMALL, tmp_path)


@pytest.mark.parametrize("name", ["simple-examples.tgz", "ptb.zip"])
@pytest.mark.parametrize("kept", [0, 0.4, 0.99])
def test_a_truncated_archive_is_named(tmp_path, name, kept):
    LAYOUTS[name](tmp_path)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(ExperimentError, match=f"{tmp_path / name} is truncated or corrupt"):
        read(SMALL, tmp_path)


def test_a_flipped_bit_in_a_zip_is_noticed(tmp_path):
    zipped(tmp_path / "ptb.zip")
    broken = bytearray((tmp_path / "ptb.zip").read_bytes())
    broken[60] ^= 1
    (tmp_path / "ptb.zip").write_bytes(broken)
    with pytest.raises(ExperimentError, match=r"ptb\.zip is truncated or corrupt"):
        read(SMALL, tmp_path)


def test_a_missing_text_is_named(tmp_path):
    loose(tmp_path)
    (tmp_path / "ptb.valid.txt").unlink()
    with pytest.raises(ExperimentError, match=r"ptb\.valid\.txt: No such file"):
        read(SMALL, tmp_path)


def test_no_data_says_what_is_wanted_and_how_to_get_it(tmp_path):
    with pytest.raises(ExperimentError) as caught:
        penn_treebank(tmp_path)
    said = str(caught.value)
    assert f"no Penn Treebank in {tmp_path}" in said
    assert "simple-examples.tgz" in said
    assert "curl" in said
    assert all(remote.url in said for remote in SOURCE.remotes)


def test_another_text_of_the_same_name_is_not_taken_for_it(tmp_path):
    loose(tmp_path)
    with pytest.raises(ExperimentError, match="checksum is not that of the published file"):
        penn_treebank(tmp_path)
