"""Models of the Hugging Face Hub, against a hub on this machine; no test uses a network."""

import hashlib
import random
import shutil
import warnings
from collections import namedtuple

import pytest
from fake_hub import COMMIT, TOKEN, FakeHub, Repo, use_hub

import edgeinfer
from edgeinfer.common.errors import DownloadError, InvalidArgument, ModelNotFound
from edgeinfer.library import hub as module
from edgeinfer.library.hub import choose, fetch
from edgeinfer.library.references import HubReference, parse_reference, url_advice

CONTENT = random.Random(0).randbytes(300_000)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture
def hub():
    with FakeHub() as served:
        yield served


@pytest.fixture
def cache(hub, monkeypatch, tmp_path):
    """The folder of the cache of this process, which uses the hub."""
    use_hub(monkeypatch, hub, tmp_path)
    return tmp_path / "hub"


def get(name, progress=lambda what, share: None):
    return fetch(parse_reference(name, "-hf"), progress)


def parts_in(cache):
    return list(cache.rglob("*.incomplete"))


# ---- Which file is meant ---------------------------------------------------------------------------------------------

FILES = (
    "README.md",
    "m-BF16.gguf",
    "m-IQ4_XS.gguf",
    "m-Q4_0.gguf",
    "m-Q4_K_M.gguf",
    "m-UD-Q4_K_XL.gguf",
    "m.q8_0.gguf",
)


@pytest.mark.parametrize(
    "name, files, chosen",
    [
        ("u/r", FILES, "m-Q4_K_M.gguf"),
        ("u/r:q4_k_m", FILES, "m-Q4_K_M.gguf"),
        ("u/r:latest", FILES, "m-Q4_K_M.gguf"),
        ("u/r:Q8_0", FILES, "m.q8_0.gguf"),
        ("u/r:UD-Q4_K_XL", FILES, "m-UD-Q4_K_XL.gguf"),
        ("u/r:q4_k_xl", FILES, "m-UD-Q4_K_XL.gguf"),
        ("u/r:bf16", FILES, "m-BF16.gguf"),
        ("u/r:Q4_0", ("m-Q4_0_4_4.gguf", "m-Q4_0.gguf"), "m-Q4_0.gguf"),
        ("u/r:F16", ("m-BF16.gguf", "m-F16.gguf"), "m-F16.gguf"),
        ("u/r:Q4_K_XL", ("m-UD-Q4_K_XL.gguf", "m-Q4_K_XL.gguf"), "m-Q4_K_XL.gguf"),
        ("u/r:Q6_K", ("Q4_K_M/m.gguf", "Q6_K/m.gguf"), "Q6_K/m.gguf"),
        ("u/r", ("only.gguf", "config.json"), "only.gguf"),
        ("u/r", ("mmproj-Q4_K_M.gguf", "m-Q8_0.gguf"), "m-Q8_0.gguf"),
        ("u/r", ("imatrix-Q4_K_M.gguf", "m-Q8_0.gguf"), "m-Q8_0.gguf"),
        ("u/r:Q8_0", ("mmproj-m-Q8_0.gguf", "m-Q8_0.gguf"), "m-Q8_0.gguf"),
        ("u/r/m-BF16.gguf", FILES, "m-BF16.gguf"),
        ("u/r/mmproj-F16.gguf", ("mmproj-F16.gguf", "m-Q4_K_M.gguf"), "mmproj-F16.gguf"),
    ],
)
def test_the_file_is_that_of_the_quantisation(name, files, chosen):
    assert list(choose(parse_reference(name, "-hf"), files)) == [chosen]


def test_all_parts_of_a_split_model_are_meant_whichever_is_named():
    parts = [f"Q4_K_M/m-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for wanted in (HubReference("u/r"), HubReference("u/r", "Q4_K_M"), HubReference("u/r", None, parts[1])):
        assert choose(wanted, ["m-Q8_0.gguf", *reversed(parts)]) == parts
    with pytest.raises(ModelNotFound, match="lacks part 2$"):
        choose(HubReference("u/r"), [parts[0], parts[2]])


def test_without_the_default_the_first_file_is_taken_and_the_others_are_named():
    with pytest.warns(RuntimeWarning, match=r"u/r has no Q4_K_M: taking m-BF16.gguf; it has BF16, Q5_K_M, Q8_0"):
        files = choose(HubReference("u/r"), ["m-BF16.gguf", "m-Q5_K_M.gguf", "m-Q8_0.gguf"])
    assert list(files) == ["m-BF16.gguf"]
    with pytest.warns(RuntimeWarning, match=r"several files of Q8_0: taking 7b-Q8_0.gguf.*13b-Q8_0.gguf"):
        files = choose(HubReference("u/r", "q8_0"), ["7b-Q8_0.gguf", "13b-Q8_0.gguf"])
    assert list(files) == ["7b-Q8_0.gguf"]


@pytest.mark.parametrize(
    "name, files, message",
    [
        ("u/r:Q2_K", FILES, "u/r has no quantisation Q2_K: it has BF16, IQ4_XS, Q4_0, Q4_K_M, Q8_0, UD-Q4_K_XL"),
        ("u/r:Q4_K", FILES, "no quantisation Q4_K: it has"),
        ("u/r:Q4_K_M", ("one.gguf", "two.gguf"), "no quantisation Q4_K_M: it has one.gguf, two.gguf"),
        ("u/r/other.gguf", FILES, "u/r has no file other.gguf: it has m-BF16.gguf, "),
        ("u/r", ("README.md", "a.bin"), r"u/r has no GGUF files of models: it has README.md, a.bin; look for .*r-GGUF"),
        ("u/r", ("config.json", "model.safetensors"), "edgeinfer export FOLDER --to gguf -o FILE"),
        ("u/r", ("mmproj-F16.gguf",), "no GGUF files of models: it has mmproj-F16.gguf"),
        ("u/r", (), "it has no files"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(name, files, message):
    with pytest.raises(ModelNotFound, match=message):
        choose(parse_reference(name, "-hf"), files)


# ---- Downloads -------------------------------------------------------------------------------------------------------


def test_a_model_is_downloaded_into_the_cache_that_programs_share(hub, cache):
    from huggingface_hub import hf_hub_download

    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT, "m-Q8_0.gguf": b"other", "README.md": b"text"})
    seen = []
    path = get("u/r", lambda what, share: seen.append((what, share)))
    assert path == cache / f"models--u--r/snapshots/{COMMIT}/m-Q4_K_M.gguf" and path.read_bytes() == CONTENT
    assert path.resolve().name == hashlib.sha256(CONTENT).hexdigest() and parts_in(cache) == []
    assert seen[0][0].startswith("downloading m-Q4_K_M.gguf: ") and [share for _, share in seen[-2:]] == [1.0, 1.0]
    assert sorted(share for _, share in seen) == [share for _, share in seen]
    n_before = len(hub.log)
    assert hf_hub_download("u/r", "m-Q4_K_M.gguf") == str(path)
    assert not any(method == "GET" for method, *_ in hub.log[n_before:]), "another program found it"


def test_a_second_call_reads_no_file_and_without_a_connection_none_is_needed(hub, cache, monkeypatch, tmp_path):
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT, "m-Q8_0.gguf": b"other"})
    path = get("u/r")
    n_before = len(hub.log)
    assert get("u/r") == path and [what for what, *_ in hub.log[n_before:]] == ["GET"], "the list of files alone"
    use_hub(monkeypatch, None, tmp_path)
    with pytest.warns(
        RuntimeWarning, match="127.0.0.1:1 cannot be reached.*using m-Q4_K_M.gguf, which is in the cache"
    ):
        assert get("u/r") == path
    use_hub(monkeypatch, hub, tmp_path)
    hub.status = 503
    with pytest.warns(RuntimeWarning, match="answers with status 503"):
        assert get("u/r:q4_k_m") == path


def test_offline_is_what_the_cache_has_and_asks_nobody(hub, cache, monkeypatch, tmp_path):
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT, "m-Q8_0.gguf": b"other"})
    path = get("u/r")
    use_hub(monkeypatch, hub, tmp_path, offline=True)
    n_before = len(hub.log)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get("u/r") == get("u/r:q4_k_m") == path
    with pytest.raises(ModelNotFound, match="no quantisation Q8_0: the cache has Q4_K_M; HF_HUB_OFFLINE is set"):
        get("u/r:Q8_0")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set, and nothing of it is in the cache"):
        get("u/other")
    assert len(hub.log) == n_before


def test_no_network_is_one_error_that_says_where_to_look(cache, monkeypatch, tmp_path):
    use_hub(monkeypatch, None, tmp_path)
    with pytest.raises(DownloadError, match="cannot be reached.*nothing of it is in the cache.*`edgeinfer models`"):
        get("u/r")


def test_all_parts_of_a_split_model_are_downloaded(hub, cache):
    files = {f"m-Q4_K_M-0000{number}-of-00003.gguf": bytes([number]) * 70_000 for number in (1, 2, 3)}
    hub.repos["u/r"] = Repo({"m-Q8_0.gguf": b"other", **files})
    shares = []
    path = get("u/r", lambda what, share: shares.append(share))
    assert path.name == "m-Q4_K_M-00001-of-00003.gguf"
    assert {each.name: each.read_bytes() for each in path.parent.iterdir()} == files
    assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.parametrize("break_after", [1000, 100_000, 299_999])
def test_a_download_that_breaks_goes_on_where_it_broke(hub, cache, break_after):
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT[: 3 * break_after]})
    hub.break_after = break_after
    assert get("u/r").read_bytes() == CONTENT[: 3 * break_after]
    asked = [int(each.removeprefix("bytes=").rstrip("-")) for each in hub.ranges_asked()]
    assert asked == list(range(0, len(CONTENT[: 3 * break_after]), break_after))


def test_what_there_is_of_a_file_is_kept_for_the_next_process(hub, cache, monkeypatch, tmp_path):
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT})

    class Stop(KeyboardInterrupt):
        pass

    def interrupt(what, share):
        if share > 0.4:
            raise Stop

    with pytest.raises(Stop):
        get("u/r", interrupt)
    (part,) = parts_in(cache)
    assert 0.4 * len(CONTENT) < (size := part.stat().st_size) < len(CONTENT) and part.read_bytes() == CONTENT[:size]
    hub.log.clear()
    assert get("u/r").read_bytes() == CONTENT and parts_in(cache) == []
    assert hub.ranges_asked() == [f"bytes={size}-"]


def test_a_server_that_sends_nothing_more_is_given_up_and_the_part_is_kept(hub, cache):
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT}, served={"m-Q4_K_M.gguf": CONTENT[:70_000]})
    hub.ranges = False
    with pytest.raises(DownloadError, match="ends at byte 70000 of 300000; what there is of it is kept"):
        get("u/r")
    assert parts_in(cache)[0].read_bytes() == CONTENT[:70_000]
    del hub.repos["u/r"].served["m-Q4_K_M.gguf"]
    assert get("u/r").read_bytes() == CONTENT, "all of it, as that server knows no ranges"


@pytest.mark.parametrize("kept", [b"x" * 1000, b"x" * len(CONTENT), b"x" * 2 * len(CONTENT)])
def test_a_damaged_file_is_an_error_and_is_gone(hub, cache, kept):
    hub.repos["u/r"] = Repo(
        {"m-Q4_K_M.gguf": CONTENT}, served={"m-Q4_K_M.gguf": CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])}
    )
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    part = cache / f"models--u--r/blobs/{sha256}.incomplete"
    for before in (None, kept):  # also what an earlier download has left
        if before is not None:
            part.write_bytes(before)
        with pytest.raises(DownloadError, match=f"m-Q4_K_M.gguf is damaged, its SHA-256 must be {sha256}: found"):
            get("u/r")
        assert [path for path in cache.rglob("*") if path.is_file() and path.name.startswith(sha256[:8])] == [
            path for path in cache.rglob("*.lock")
        ]
    del hub.repos["u/r"].served["m-Q4_K_M.gguf"]
    assert get("u/r").read_bytes() == CONTENT


def test_a_file_of_the_cache_that_was_cut_is_fetched_again(hub, cache):
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT})
    path = get("u/r")
    path.resolve().write_bytes(CONTENT[:1000])
    assert get("u/r").read_bytes() == CONTENT


def test_a_newer_commit_is_fetched_and_what_has_not_changed_is_not(hub, cache):
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT})
    first = get("u/r")
    hub.repos["u/r"].commit = "f" * 40
    hub.log.clear()
    second = get("u/r")
    assert second.parent.name == "f" * 40 and second.resolve() == first.resolve() and hub.ranges_asked() == []
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": b"new" * 1000}, commit="e" * 40)
    assert get("u/r").read_bytes() == b"new" * 1000


def test_too_little_room_is_said_before_anything_is_fetched(hub, cache, monkeypatch):
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT})
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 100_000))
    with pytest.raises(DownloadError, match=r"u/r needs 293.0 KiB more on disk, free are 97.7 KiB in .*195.3 KiB are"):
        get("u/r")
    assert hub.ranges_asked() == []
    part = cache / f"models--u--r/blobs/{hashlib.sha256(CONTENT).hexdigest()}.incomplete"
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(CONTENT[:200_000])
    assert get("u/r").read_bytes() == CONTENT, "what is there already needs no room"


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(hub, cache, monkeypatch, tmp_path):
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT})
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file/hub"))
    with pytest.raises(DownloadError, match="file/hub.*: Not a directory"):
        get("u/r")


@pytest.mark.parametrize("name", ["../../../../victim-Q4_K_M.gguf", "/victim-Q4_K_M.gguf", "a//b.gguf", "a\\b.gguf"])
def test_a_hub_that_names_files_elsewhere_reaches_none(hub, cache, tmp_path, name):
    (tmp_path / "victim-Q4_K_M.gguf").write_bytes(b"mine")
    hub.repos["u/r"] = Repo({name: CONTENT})
    with pytest.raises(DownloadError, match="u/r has a file that no repository can have: "):
        get("u/r")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["victim-Q4_K_M.gguf"]


def test_a_hub_that_gives_no_hash_for_a_hash_reaches_no_file(hub, cache, monkeypatch, tmp_path):
    (tmp_path / "victim").write_bytes(b"mine")
    monkeypatch.setattr("fake_hub._sha256", lambda data: "../../../victim")
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT})
    with pytest.raises(
        DownloadError, match="the hub must give the SHA-256 of m-Q4_K_M.gguf, it gave '../../../victim'"
    ):
        get("u/r")
    assert (tmp_path / "victim").read_bytes() == b"mine"


# ---- Access ----------------------------------------------------------------------------------------------------------


def test_a_gated_model_says_where_to_accept_and_how_to_give_a_token(hub, cache, monkeypatch, tmp_path):
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT}, needs_token="gated", accepted=False)
    with pytest.raises(DownloadError, match=f"u/r is gated: accept its terms at {hub.endpoint}/u/r, .*HF_TOKEN"):
        get("u/r")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(DownloadError, match="is gated: .*the one in use has no access"):
        get("u/r")
    hub.repos["u/r"].accepted = True
    assert get("u/r").read_bytes() == CONTENT


@pytest.mark.parametrize("place", ["variable", "file"])
def test_a_token_is_taken_from_its_usual_place_and_goes_to_the_hub_alone(hub, cache, monkeypatch, tmp_path, place):
    hub.repos["u/r"] = Repo({"m-Q4_K_M.gguf": CONTENT}, needs_token="private")
    with pytest.raises(ModelNotFound, match=f"{hub.endpoint}/u/r: there is no such repository, or it is private"):
        get("u/r")
    if place == "file":
        (tmp_path / "token").write_text(f"{TOKEN}\n")
    else:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert get("u/r").read_bytes() == CONTENT and hub.leaked == []
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(DownloadError, match="refuses the token: check HF_TOKEN"):
        get("u/r")


@pytest.mark.parametrize("with_token", [False, True])
def test_a_repository_that_is_not_there_is_said(hub, cache, monkeypatch, with_token):
    if with_token:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ModelNotFound, match="there is no such repository, or it is private"):
        get("u/nothing")


# ---- Names and URLs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "r", "u/", "/r", "u/r:", "u/r/x", "../r", "u/..", "a b/c", "u/r:a:b", "u/../r/x.gguf"]
)
def test_what_is_no_repository_is_said_with_an_example(name):
    with pytest.raises(InvalidArgument, match="-hf must be USER/REPO or USER/REPO:QUANT, such as"):
        parse_reference(name, "-hf")


@pytest.mark.parametrize(
    "url, advice",
    [
        ("https://huggingface.co/u/r", "-hf u/r fetches it"),
        ("https:/huggingface.co/u/r", "https://huggingface.co/u/r is a URL: -hf u/r fetches it"),
        ("http://www.huggingface.co/u/r/tree/main", "-hf u/r fetches it"),
        ("https://hf.co/u/r:Q8_0", "-hf u/r:Q8_0 fetches it"),
        ("hf.co/u/r:Q8_0", "-hf u/r:Q8_0 fetches it"),
        ("huggingface.co/u/r", "-hf u/r fetches it"),
        ("hf://u/r", "-hf u/r fetches it"),
        ("https://huggingface.co/u/r/resolve/main/m-Q4_0.gguf?download=true", "-hf u/r -hff m-Q4_0.gguf fetches it"),
        ("https://huggingface.co/u/r/blob/main/Q8_0/m%201.gguf", "-hf u/r -hff 'Q8_0/m 1.gguf' fetches it"),
        ("https://huggingface.co/datasets/u/r", "-hf USER/REPO[:QUANT] fetches a model"),
        ("https://huggingface.co", "-hf USER/REPO[:QUANT] fetches a model"),
        ("https://ollama.com/library/qwen3:4b", "`ollama pull qwen3:4b` fetches it, and then -m qwen3:4b runs it"),
        ("registry.ollama.ai/u/m", "`ollama pull u/m` fetches it"),
        ("https://example.org/m.gguf", "download the file, and name that one"),
        ("s3://bucket/m.gguf", "download the file"),
        ("file:///models/m%20n.gguf", "name the file itself, /models/m n.gguf"),
    ],
)
def test_a_url_says_what_to_do(url, advice):
    assert advice in url_advice(url)
    with pytest.raises(InvalidArgument, match="is a URL"):
        edgeinfer.load(url)


@pytest.mark.parametrize("name", ["m.gguf", "u/r", "u/r:Q4", "C:/m.gguf", "qwen3:4b", "hf.co", "a/hf.co/b"])
def test_what_is_no_url_has_no_advice(name):
    assert url_advice(name) is None
