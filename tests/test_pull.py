"""`lean pull` from a hub on this machine that speaks the protocol of the real one."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gguf_fixtures import write_moe_gguf
from hub_server import COMMIT, Hub, hub
from leanmoe.errors import FormatError, LeanError, UsageError
from leanmoe.hub import Pulled, RemoteFile, choose_files, parse_reference, pull
from leanmoe.pack import PackProgress, open_pack, pack_gguf, verify_pack

NEEDED = {"qwen3moe.attention.head_count": 4, "qwen3moe.expert_feed_forward_length": 32}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Hub]:
    """A hub with a repository of GGUF models, one of them split, and one of a checkpoint."""
    models = tmp_path / "hub" / "models"
    (models / "Q8_0").mkdir(parents=True)
    write_moe_gguf(models / "tiny-Q4_K_M.gguf", seed=1, keys=NEEDED)
    write_moe_gguf(models / "tiny-UD-Q4_K_XL.gguf", seed=2, keys=NEEDED)
    write_moe_gguf(models / "Q8_0" / "tiny-Q8_0.gguf", seed=3, keys=NEEDED, split_max_tensors=7)
    (models / "README.md").write_text("A model.")
    (models / "mmproj-Q8_0.gguf").write_bytes(b"GGUF")
    with hub() as state:
        state.repos["someone/tiny-GGUF"] = models
        yield state


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's own settings, and nothing written outside the test's directory."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)


def digests(path: Path) -> dict[str, bytes]:
    return {name: digest for name, digest in open_pack(path).digests.items() if name != "manifest.json"}


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        (None, "tiny-Q4_K_M.gguf"),
        ("q4_k_m", "tiny-Q4_K_M.gguf"),
        ("Q4_K_XL", "tiny-UD-Q4_K_XL.gguf"),
        ("Q8_0", "Q8_0/tiny-Q8_0-00001-of-00003.gguf"),
    ],
)
def test_the_model_with_that_tag_is_fetched_and_packed(
    server: Hub, tmp_path: Path, tag: str | None, file: str
) -> None:
    """Another model than the one asked for, or half a model, would be packed."""
    source = server.repos["someone/tiny-GGUF"] / file
    want = digests(pack_gguf(source, tmp_path / "want.lmpack"))
    seen: list[PackProgress] = []
    reference = "someone/tiny-GGUF" + (f":{tag}" if tag else "")
    pulled = pull(reference, endpoint=server.address, downloading=seen.append)
    assert pulled.commit == COMMIT
    assert pulled.pack == Path("tiny" + (f"-{tag}" if tag else "") + ".lmpack")
    assert digests(pulled.pack) == want
    assert [at.done for at in seen] == sorted(at.done for at in seen)
    assert seen[-1].done == seen[-1].total
    fetched = {name for name in server.sent if name.endswith(".gguf")}
    assert fetched == {name for name in server.sent if name.startswith(file.split("-0000")[0])}
    assert not [path.name for path in tmp_path.iterdir() if "download" in path.name]


@pytest.mark.parametrize("by", ["the network", "the user"])
def test_a_download_that_breaks_off_goes_on_where_it_was(
    server: Hub, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour of downloading would be lost to one dropped connection."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)  # what is written at a time
    name = "tiny-Q4_K_M.gguf"
    size = (server.repos["someone/tiny-GGUF"] / name).stat().st_size

    def stop(at: PackProgress) -> None:
        if at.done > size // 2:
            raise KeyboardInterrupt

    if by == "the network":
        server.cut.add(name)
    else:
        with pytest.raises(KeyboardInterrupt):
            pull("someone/tiny-GGUF:Q4_K_M", endpoint=server.address, downloading=stop)
    seen: list[PackProgress] = []
    pull("someone/tiny-GGUF:Q4_K_M", endpoint=server.address, downloading=seen.append)
    assert [int(wanted[6:].split("-")[0]) >= size // 3 for _, wanted in server.ranges] == [True]
    assert (seen[-1].done, seen[-1].total) == (size, size)


def test_packing_that_was_interrupted_does_not_download_again(server: Hub, tmp_path: Path) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("someone/tiny-GGUF:Q8_0", Path("out.lmpack"), endpoint=server.address, packing=stop)
    before = dict(server.sent)
    pull("someone/tiny-GGUF:Q8_0", Path("out.lmpack"), endpoint=server.address)
    assert server.sent == before
    source = server.repos["someone/tiny-GGUF"] / "Q8_0/tiny-Q8_0-00001-of-00003.gguf"
    assert digests(Path("out.lmpack")) == digests(pack_gguf(source, tmp_path / "want.lmpack"))


def test_a_pull_that_was_killed_before_its_last_step_ends_with_the_next(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pack would have its name and still be refused, with the download left beside it."""

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("leanmoe.pack.writer._delete_source", die)
        with pytest.raises(KeyboardInterrupt):
            pull("someone/tiny-GGUF:Q4_K_M", endpoint=server.address)
    pulled = pull("someone/tiny-GGUF:Q4_K_M", endpoint=server.address)
    assert pulled == Pulled(Path("tiny-Q4_K_M.lmpack"), COMMIT)
    assert not Path("tiny-Q4_K_M.download").exists()
    with pytest.raises(UsageError, match="already exists"):
        pull("someone/tiny-GGUF:Q4_K_M", endpoint=server.address)


def test_a_repository_that_changes_meanwhile_is_not_mixed(server: Hub) -> None:
    """Shards of two versions would be packed as one model."""
    Path("tiny-Q4_K_M.download").mkdir()
    (Path("tiny-Q4_K_M.download") / "commit").write_text("f" * 40)
    with pytest.raises(UsageError, match="part of another version"):
        pull("someone/tiny-GGUF:Q4_K_M", endpoint=server.address)


def test_a_file_that_is_not_what_the_hub_lists_is_fetched_anew(server: Hub) -> None:
    """A half file from elsewhere would become the first half of the model."""
    folder = Path("tiny-Q4_K_M.download")
    folder.mkdir()
    (folder / "tiny-Q4_K_M.gguf.part").write_bytes(b"something else")
    with pytest.raises(FormatError, match="not those the hub lists"):
        pull("someone/tiny-GGUF:Q4_K_M", endpoint=server.address)
    pull("someone/tiny-GGUF:Q4_K_M", endpoint=server.address)


@pytest.mark.parametrize("keep", [False, True])
def test_each_shard_is_packed_while_the_next_is_fetched(
    server: Hub, tmp_path: Path, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that fills the disk could not be had at all; and the network would idle while the disk works."""
    monkeypatch.setattr("leanmoe.hub.download._HEAD", 1024)  # less than the header takes
    source = server.repos["someone/tiny-GGUF"] / "Q8_0/tiny-Q8_0-00001-of-00003.gguf"
    last = "Q8_0/tiny-Q8_0-00003-of-00003.gguf"
    large = source.with_name(Path(last).name).stat().st_size // 2
    begun: list[int] = []
    pulled = pull(
        "someone/tiny-GGUF:Q8_0",
        overlap=True,
        keep=keep,
        endpoint=server.address,
        packing=lambda at: begun.append(server.sent.get(last, 0)),
    )
    assert begun[0] < large  # of the last shard only the header was there when packing began
    assert server.sent[last] > large
    want = pack_gguf(source, tmp_path / "want.lmpack")
    assert digests(pulled.pack) == digests(want)
    assert verify_pack(pulled.pack) == []
    kept = Path("tiny-Q8_0.download")
    assert kept.exists() == keep
    if keep:
        assert (kept / last).read_bytes() == source.with_name(Path(last).name).read_bytes()


@pytest.mark.parametrize("again", [False, True])
def test_an_overlapped_pull_that_was_interrupted_goes_on(server: Hub, tmp_path: Path, again: bool) -> None:
    seen: list[int] = []

    def stop(at: PackProgress) -> None:
        seen.append(at.done)
        if at.done > at.total // 2:
            raise KeyboardInterrupt

    out = Path("out.lmpack")
    with pytest.raises(KeyboardInterrupt):
        pull("someone/tiny-GGUF:Q8_0", out, overlap=True, endpoint=server.address, packing=stop)
    pull("someone/tiny-GGUF:Q8_0", out, overlap=again, endpoint=server.address)
    source = server.repos["someone/tiny-GGUF"] / "Q8_0/tiny-Q8_0-00001-of-00003.gguf"
    assert digests(out) == digests(pack_gguf(source, tmp_path / "want.lmpack"))


def test_a_shard_that_cannot_be_fetched_ends_an_overlapped_pull(server: Hub) -> None:
    """Packing would wait for ever."""
    server.missing.add("Q8_0/tiny-Q8_0-00003-of-00003.gguf")
    with pytest.raises(LeanError, match="fetching stopped"):
        pull("someone/tiny-GGUF:Q8_0", overlap=True, endpoint=server.address)


def test_kept_files_are_those_of_the_hub(server: Hub) -> None:
    pull("someone/tiny-GGUF:Q4_K_M", keep=True, endpoint=server.address)
    kept = Path("tiny-Q4_K_M.download/tiny-Q4_K_M.gguf").read_bytes()
    assert kept == (server.repos["someone/tiny-GGUF"] / "tiny-Q4_K_M.gguf").read_bytes()


def test_a_checkpoint_is_fetched_and_quantised(server: Hub, tmp_path: Path) -> None:
    """Most models are published as checkpoints first."""
    from leanmoe.convert import CheckpointSource
    from leanmoe.pack import pack_source
    from oracles.checkpoint import tiny_checkpoint

    folder = tiny_checkpoint(tmp_path / "hub" / "hf", "qwen3moe", wide=True, max_shard_size="1MB").path
    assert len(list(folder.glob("*.safetensors"))) > 1
    (folder / "consolidated.safetensors").write_bytes(b"another copy")
    server.repos["someone/tiny"] = folder
    pulled = pull("someone/tiny:q4_k_m", endpoint=server.address)
    (folder / "consolidated.safetensors").unlink()
    source = CheckpointSource(folder, "q4_k_m", name="tiny-q4_k_m")
    assert digests(pulled.pack) == digests(pack_source(source, tmp_path / "want.lmpack"))
    shutil.rmtree(pulled.pack)
    pulled = pull("someone/tiny:q4_k_m", endpoint=server.address, overlap=True)
    assert digests(pulled.pack) == digests(tmp_path / "want.lmpack")
    assert "consolidated.safetensors" not in server.sent


def test_what_cannot_be_had_is_said(server: Hub, tmp_path: Path) -> None:
    """A typing error would end in a traceback of a network library."""
    server.gated.add("someone/secret")
    server.repos["someone/nothing"] = tmp_path / "empty"
    (tmp_path / "empty").mkdir()
    for reference, words in {
        "someone/none": "no such repository",
        "someone/secret": "gated",
        "someone/tiny-GGUF:Q2_K": "one of: Q4_K_M, Q8_0, UD-Q4_K_XL",
        "someone/nothing": "neither a GGUF nor a safetensors",
        "tiny": "OWNER/NAME",
    }.items():
        with pytest.raises(UsageError, match=words):
            pull(reference, endpoint=server.address)
    with pytest.raises(LeanError, match=r"someone/tiny-GGUF: fetching stopped"):
        pull("someone/tiny-GGUF", endpoint="http://127.0.0.1:9")
    assert not list(tmp_path.glob("*.lmpack*"))


def test_the_command_takes_the_hub_from_the_environment(
    server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import os
    import subprocess
    import sys

    environment = {**os.environ, "HF_ENDPOINT": server.address}
    command = [sys.executable, "-m", "leanmoe", "pull", "someone/tiny-GGUF:Q4_K_M"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "tiny-Q4_K_M.lmpack"), done.stderr
    shutil.rmtree("tiny-Q4_K_M.lmpack")
    done = subprocess.run(
        [*command[:-1], "no/such"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "no such repository" in done.stderr) == (2, True)


def names(*files: str) -> list[RemoteFile]:
    return [RemoteFile(name, 1) for name in files]


def test_choosing_among_files() -> None:
    """A repository's own way of naming would make lean fetch the wrong model, or none."""

    def chosen(files: list[RemoteFile], quant: str | None) -> list[str]:
        return [file.name for file in choose_files("a/b", files, quant).files]

    split = [f"UD-Q4_K_XL/M-UD-Q4_K_XL-{i:05d}-of-00002.gguf" for i in (2, 1)]
    files = names(
        "M-Q4_K_M.gguf", "M-Q4_K_S.gguf", "M-IQ4_XS.gguf", "M-BF16.gguf", "mmproj-M-BF16.gguf", *split
    )
    assert chosen(files, None) == ["M-Q4_K_M.gguf"]
    assert chosen(files, "iq4_xs") == ["M-IQ4_XS.gguf"]
    assert chosen(files, "BF16") == ["M-BF16.gguf"]
    assert chosen(files, "UD-Q4_K_XL") == chosen(files, "Q4_K_XL") == sorted(split)
    assert chosen(names("only-one.gguf", "config.json"), None) == ["only-one.gguf"]
    both = names(
        "M-Q8_0.gguf", "config.json", "model.safetensors", "tokenizer.json", "original/x.safetensors"
    )
    assert chosen(both, "Q8_0") == ["M-Q8_0.gguf"]
    assert chosen(both, "Q4_K_M") == ["config.json", "tokenizer.json", "model.safetensors"]
    for files, quant, words in (
        (names("a-Q8_0.gguf", "b-Q8_0.gguf"), "Q8_0", "several GGUF models fit"),
        (names("a-Q8_0.gguf", "a-Q6_K.gguf"), None, "one of: Q6_K, Q8_0"),
        (names("m-Q8_0-00001-of-00002.gguf"), "Q8_0", "1 of its 2 shards"),
        (names("config.json", "model.safetensors"), "Q9_Z", "no quantisation that lean writes"),
    ):
        with pytest.raises(UsageError, match=words):
            choose_files("a/b", files, quant)


def test_references() -> None:
    assert parse_reference("a/b") == ("a/b", None, None)
    assert parse_reference("a-1/b.c_2:UD-Q4_K_XL@v1/x") == ("a-1/b.c_2", "UD-Q4_K_XL", "v1/x")
    for bad in ("", "a", "a/b/c", "a/b:", "a/../b", "a/b:x:y", "/a/b", "a/b\n"):
        with pytest.raises(UsageError):
            parse_reference(bad)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>a portal</html>", "no list of files"),
        (b"[1]", "no list of files"),
        (b'{"id": "a/b", "siblings": []}', "names no commit"),
        (b'{"id": "a/b", "sha": "../x", "siblings": []}', "names no commit"),
        (b'{"id": "a/b", "sha": "f", "siblings": [{"rfilename": "m.gguf", "size": "x"}]}', "a size of 'x'"),
        (b'{"id": "a/b", "sha": "f", "siblings": [{"rfilename": "m.gguf", "size": -5}]}', "a size of -5"),
        (b'{"id": "a/b", "sha": "f", "siblings": [{"rfilename": "../m.gguf"}]}', "leads out"),
        (b'{"id": "a/b", "sha": "f", "siblings": [{"rfilename": "m\\u0000.gguf"}]}', "leads out"),
    ],
)
def test_an_answer_that_is_no_listing_is_said(server: Hub, body: bytes, says: str, tmp_path: Path) -> None:
    """A portal or a broken mirror would end in a traceback."""
    server.listings["a/b"] = body
    with pytest.raises(LeanError, match=says):
        pull("a/b", endpoint=server.address)
    assert not list(tmp_path.glob("*.lmpack*"))


def test_a_damaged_head_is_fetched_anew(server: Hub) -> None:
    """The next run would take the damaged head for the file's, for ever."""
    file = server.repos["someone/tiny-GGUF"] / "tiny-Q4_K_M.gguf"
    whole = file.read_bytes()
    file.write_bytes(b"X" * len(whole))
    with pytest.raises(FormatError, match="header that cannot be read"):
        pull("someone/tiny-GGUF:Q4_K_M", overlap=True, endpoint=server.address)
    file.write_bytes(whole)
    pull("someone/tiny-GGUF:Q4_K_M", overlap=True, endpoint=server.address)


@pytest.mark.parametrize("overlap", [False, True])
def test_two_pulls_at_once_do_not_mix(server: Hub, overlap: bool) -> None:
    """Both would append to the same half file."""
    refused: list[str] = []

    def again(_: object) -> None:
        if not refused:
            with pytest.raises(UsageError, match="another lean pull") as error:
                pull("someone/tiny-GGUF:Q4_K_M", endpoint=server.address)
            refused.append(str(error.value))

    pull("someone/tiny-GGUF:Q4_K_M", overlap=overlap, endpoint=server.address, packing=again)
    assert len(refused) == 1
