from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lightning_3d.reference import text_files
from lightning_3d.reference.text_files import default_cache_dir, find_text, open_tokens, token_dtype, tokenize_once
from lightning_3d.reference.text_tokenizer import ByteTokenizer, load_tokenizer


@pytest.fixture
def two_files(tmp_path: Path) -> list[str]:
    (tmp_path / "a.txt").write_bytes(b"first\nfile\n")
    (tmp_path / "b.txt").write_bytes("zweite Dätei".encode())
    return [str(tmp_path / "*.txt")]


def tokens(files: list[str], cache: Path, max_bytes: int | None = None) -> bytes:
    path = tokenize_once(find_text(files, max_bytes), ByteTokenizer(), cache)
    return open_tokens(path, 257).tobytes()


def expected(*parts: bytes) -> bytes:
    return b"".join(np.array([*part, 256], dtype=np.uint16).tobytes() for part in parts)


def test_bytes_become_tokens_and_each_file_ends(two_files: list[str], tmp_path: Path) -> None:
    assert tokens(two_files, tmp_path / "cache") == expected(b"first\nfile\n", "zweite Dätei".encode())


@pytest.mark.parametrize("piece", [1, 4, 1 << 20])
@pytest.mark.parametrize("cap", [1, 5, 11, 12, 14, 99])
def test_the_cap_counts_bytes_over_all_files(
    two_files: list[str], tmp_path: Path, cap: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "PIECE_BYTES", piece)
    parts = [b"first\nfile\n"[:cap], "zweite Dätei".encode()[: max(0, cap - 11)]]
    assert tokens(two_files, tmp_path / "cache", cap) == expected(*(part for part in parts if part))


def test_tokens_are_written_once_and_again_when_something_changes(two_files: list[str], tmp_path: Path) -> None:
    def files() -> int:
        return len(list((tmp_path / "cache").glob("*.tokens")))

    tokens(two_files, tmp_path / "cache")
    written = next((tmp_path / "cache").glob("*.tokens")).stat().st_mtime_ns
    tokens(two_files, tmp_path / "cache")
    assert next((tmp_path / "cache").glob("*.tokens")).stat().st_mtime_ns == written
    tokens(two_files, tmp_path / "cache", max_bytes=5)
    assert files() == 2
    (tmp_path / "a.txt").write_bytes(b"other\nfile\n")
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert tokens(two_files, tmp_path / "cache").startswith(expected(b"other\nfile\n"))
    assert files() == 3


def test_files_come_once_in_the_order_named_and_globs_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("c.txt", "a.txt", "sub/b.txt", "odd[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    found = find_text(["c.txt", "**/*.txt", "odd[1].txt"], None).paths
    assert [os.path.relpath(path, tmp_path) for path in found] == ["c.txt", "a.txt", "odd[1].txt", "sub/b.txt"]


def test_the_default_corpus_is_the_standard_library_without_its_tests() -> None:
    paths = find_text(None, None).paths
    assert len(paths) > 100
    assert list(paths) == sorted(paths)
    assert any(path.endswith("/json/decoder.py") for path in paths)
    assert not any("/site-packages/" in path or "/test/" in path for path in paths)


def test_missing_files_and_empty_ones(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(FileNotFoundError, match=f"no file matches 'nowhere/\\*.txt', looked up from {os.getcwd()}"):
        find_text(["nowhere/*.txt"], None)
    with pytest.raises(ValueError, match=r"the corpus is empty: 1 file\(s\) of 0 bytes"):
        find_text([str(tmp_path / "*.txt")], None)
    with pytest.raises(ValueError, match="the corpus is empty: 0 file"):
        find_text([], None)
    with pytest.raises(ValueError, match="max_bytes=0"):
        find_text(None, 0)


def test_a_cache_that_cannot_be_written(two_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match=r"Permission denied\n  fix: cache_dir="):
        tokens(two_files, tmp_path / "cache")


def test_a_corpus_that_cannot_be_read_is_not_the_caches_fault(
    two_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str | Path, mode: str) -> object:
        if mode == "rb":
            raise PermissionError(13, "Permission denied", path)
        return open(path, mode)

    monkeypatch.setattr(text_files, "open", refuse, raising=False)
    with pytest.raises(PermissionError, match=r"^\[Errno 13\] Permission denied: '.*a\.txt'$"):
        tokens(two_files, tmp_path / "cache")


def test_a_failure_leaves_nothing_behind_and_frees_the_lock(
    two_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ByteTokenizer, text: bytes) -> None:
        raise RuntimeError("no ids today")

    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode", fail)
        with pytest.raises(RuntimeError, match="no ids today"):
            tokens(two_files, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] in ([], [".lock"])
    assert tokens(two_files, tmp_path / "cache")


def test_a_lock_that_is_never_freed(two_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LOCK_SECONDS", 0.05)
    cache = tmp_path / "cache"
    text = find_text(two_files, None)
    cache.mkdir()
    with (
        text_files.FileLock(f"{cache / text.key(ByteTokenizer())}.tokens.lock"),
        pytest.raises(TimeoutError, match=r"another process has held .*\.lock"),
    ):
        tokenize_once(text, ByteTokenizer(), cache)


@pytest.mark.parametrize(("vocab", "dtype"), [(257, np.uint16), (65536, np.uint16), (65537, np.uint32)])
def test_ids_take_the_smallest_type_that_holds_them(vocab: int, dtype: type) -> None:
    assert token_dtype(vocab) == dtype


def test_the_cache_directory_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/lightning_3d/tokens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_cache_dir() == Path("/home/me/.cache/lightning_3d/tokens")


def test_processes_that_start_at_once_tokenize_once(tmp_path: Path) -> None:
    text, cache = tmp_path / "text", tmp_path / "cache"
    text.write_text("some text\n" * 100)
    worker = Path(__file__).with_name("tokenize_worker.py")
    command = [sys.executable, str(worker), text_files.__file__, str(text), str(cache), str(time.time() + 1.5)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        said = {one.communicate(timeout=60)[0] for one in workers}
    finally:
        for one in workers:
            one.kill()
    assert [one.returncode for one in workers] == [0] * 4
    assert len(said) == 1
    assert said.pop().startswith("1001 ")
    assert (tmp_path / "log").read_text() == "encoded\n"
    assert not list(cache.glob("*.unfinished"))


def test_a_hugging_face_tokenizer_from_a_directory(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the hf extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    words = {"<end>": 0, "one": 1, "two": 2, "?": 3}
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<end>", model_max_length=2)
    fast.save_pretrained(tmp_path / "saved")
    loaded = load_tokenizer(str(tmp_path / "saved"))
    assert (loaded.vocab_size, loaded.end_of_text) == (4, 0)
    assert loaded.encode(b"two one two three").tolist() == [2, 1, 2, 3]
    assert loaded.fingerprint == load_tokenizer(str(tmp_path / "saved")).fingerprint

    rules.add_tokens(["three"])
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=rules)
    other.save_pretrained(tmp_path / "endless")
    with pytest.raises(ValueError, match="has no end-of-text token"):
        load_tokenizer(str(tmp_path / "endless"))


def test_tokenizers_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    with pytest.raises(ValueError, match=r"no tokenizer '.*'(.|\n)*valid: bytes, the name"):
        load_tokenizer(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"fix: pip install 'lightning-3d\[hf\]', or tokenizer=bytes"):
        load_tokenizer("gpt2")
