# SPDX-License-Identifier: Apache-2.0
"""JSONL and text inputs: strict, exact about where, the same for every compression."""

import gzip
import json
import lzma

import pytest
import zstandard

from megatron_dyn.corpus import CorpusError
from megatron_dyn.corpus.inputs import InputSelection, read_records
from megatron_dyn.corpus.records import BadRecordError, text_of


def texts(*inputs, **kwargs) -> list[str]:
    selection = InputSelection(inputs=[str(item) for item in inputs], **kwargs)
    return [text_of(record, selection.json_key) for record in read_records(selection.files())]


def jsonl(tmp_path, content: bytes, name="x.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["valid_lf", "no_final_newline", "bom"])
def test_legal_cases(shared, name):
    assert texts(shared / "cases" / "jsonl" / f"{name}.jsonl") == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("truncated_last", ["truncated_last.jsonl, line 2", "is not complete JSON (byte 13)"]),
        ("bad_utf8", ["bad_utf8.jsonl, line 2", "not valid UTF-8 at byte 23 ", "0xff"]),
        ("missing_key", ["missing_key.jsonl, line 2", 'has no key "text"', '"txt"']),
    ],
)
def test_refused_cases_name_file_line_and_byte(shared, name, parts):
    with pytest.raises(BadRecordError) as caught:
        texts(shared / "cases" / "jsonl" / f"{name}.jsonl")
    for part in parts:
        assert part in str(caught.value)


def test_only_line_feed_ends_a_record(tmp_path):
    odd = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1c"
    content = "".join(json.dumps({"text": odd}, ensure_ascii=ascii) + end for ascii, end in ((True, "\n"), (False, "\r\n"), (False, "\n")))
    # json.dumps escapes control characters, never U+0085 and U+2028: they are in the file as they are.
    assert texts(jsonl(tmp_path, content.encode())) == [odd] * 3
    with pytest.raises(BadRecordError, match="line 1: is not complete JSON"):
        texts(jsonl(tmp_path, b'{"text":"a"}\r{"text":"b"}\n'))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text":"a","text":"b"}', r'the key "text" comes twice'),
        (b'{"text":"a","m":{"k":1,"k":2}}', r'the key "k" comes twice'),
        (b'{"text":"a"} {"text":"b"}', "is not complete JSON.*Extra data at byte 26"),
        (b'{"text":"a","n":NaN}', "NaN is not JSON"),
        (b'["a"]', "is not a JSON object but a list"),
        (b'{"text":null}', 'value of "text" is a NoneType'),
        (b'{"text":["a"]}', 'value of "text" is a list'),
        (b'{"text":"\\ud800x"}', r"lone surrogate U\+D800 at character 0"),
        (b"", "is blank"),
        (b" \r", "is blank"),
        (b'\xef\xbb\xbf{"text":"a"}', "is not complete JSON"),
        (b'{"text":"a\tb"}', "Invalid control character at byte 23"),
        (b"[" * 100_000, "nested too deep|not complete JSON"),
        (b'{"text":"a","n":' + b"1" * 5000 + b"}", "not strict JSON|Exceeds"),
        (b'{"text":"\xed\xa0\x80"}', "not valid UTF-8 at byte 22"),
        (b'{"text":"\xc0\xaf"}', "not valid UTF-8 at byte 22"),
        ('{"text":"a"}'.encode("utf-16"), "not valid UTF-8 at byte 13"),
    ],
)
def test_bad_second_line(tmp_path, line, message):
    path = jsonl(tmp_path, b'{"text":"a"}\n' + line + b"\n")
    with pytest.raises(BadRecordError, match=f"x.jsonl, line 2: .*({message})"):
        texts(path)


def test_bytes_are_counted_after_a_bom_and_non_ascii_text(tmp_path):
    with pytest.raises(BadRecordError, match=r"line 2: is not complete JSON \(byte 20\).* at byte 24 of the file"):
        texts(jsonl(tmp_path, b"\xef\xbb\xbf" + '{"text":"éé"}'.encode() + b' \n{"a"'))


def compress(kind: str, content: bytes) -> bytes:
    if kind == "gz":
        return gzip.compress(content)
    if kind == "xz":
        return lzma.compress(content)
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


CONTENT = b"".join(json.dumps({"text": f"document {i} " + "x" * (i % 700)}).encode() + b"\n" for i in range(2000))


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
def test_compressed_files_give_the_same_records(tmp_path, kind):
    plain = texts(jsonl(tmp_path, CONTENT))
    assert texts(jsonl(tmp_path, compress(kind, CONTENT), f"one.jsonl.{kind}")) == plain
    half = CONTENT.index(b"\n", len(CONTENT) // 2) - 5  # two members, cut inside a record
    both = compress(kind, CONTENT[:half]) + compress(kind, CONTENT[half:])
    assert texts(jsonl(tmp_path, both, f"two.jsonl.{kind}")) == plain


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
def test_a_cut_or_damaged_compressed_file_is_an_error(tmp_path, kind):
    good = compress(kind, CONTENT)
    # Cut so that what is left ends on a record: only the compression itself can tell.
    for size in (len(good) - 1, len(good) - 9, len(good) // 2, 3):
        with pytest.raises(CorpusError, match="cannot be read|JSON"):
            texts(jsonl(tmp_path, good[:size], f"cut.jsonl.{kind}"))
    damaged = bytearray(good)
    damaged[len(good) // 2] ^= 0xFF
    with pytest.raises(CorpusError, match="cannot be read|JSON|UTF-8"):
        texts(jsonl(tmp_path, bytes(damaged), f"damaged.jsonl.{kind}"))
    with pytest.raises(CorpusError, match="cannot be read"):
        texts(jsonl(tmp_path, b"not compressed at all\n", f"plain.jsonl.{kind}"))


def test_records_carry_line_offset_and_progress(tmp_path):
    path = jsonl(tmp_path, b'\xef\xbb\xbf{"text":"a"}\r\n{"text":"b"}')
    records = list(read_records(InputSelection(inputs=[str(path)]).files()))
    assert [(r.line, r.offset) for r in records] == [(1, 3), (2, 17)]
    assert records[-1].position == path.stat().st_size


@pytest.fixture
def tree(tmp_path):
    for name, content in {
        "b.py": b"b\r\n",
        "a/z.py": b"z",
        "a-b.py": b"dash",
        "a/test/t.py": b"t",
        "test/u.py": b"\xef\xbb\xbfu",
        "note.txt": b"n",
        "a/Z.py": b"upper",
    }.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(content)
    (tmp_path / "tree" / "folder.py").mkdir()
    return tmp_path / "tree"


def test_folder_of_texts_in_sorted_order_with_exact_content(tree):
    assert texts(tree, glob="**/*.py") == ["dash", "upper", "t", "z", "b\r\n", "u"]
    assert texts(tree, glob="**/*.py", exclude=["**/test/*"]) == ["dash", "upper", "z", "b\r\n"]
    assert texts(tree, glob="**/*.py", exclude=["test/*", "a-b.py"]) == ["upper", "t", "z", "b\r\n"]
    assert texts(tree, glob="*.txt") == ["n"]


def test_bad_text_file_is_named_with_its_byte(tree):
    (tree / "b.py").write_bytes(b"caf\xe9")
    with pytest.raises(BadRecordError, match=r"b\.py: not valid UTF-8 at byte 3 of the file \(0xe9"):
        texts(tree, glob="**/*.py")


def test_patterns_are_sorted_and_a_file_is_read_once(tmp_path):
    for name in ("b", "a", "c[1]"):
        jsonl(tmp_path, b'{"text":"%s"}' % name.encode(), f"{name}.jsonl")
    assert texts(tmp_path / "[ab].jsonl") == ["a", "b"]
    assert texts(tmp_path / "c[1].jsonl") == ["c[1]"], "a file of that very name comes before a pattern"
    assert texts(tmp_path / "*.jsonl", exclude=["*/b.jsonl"]) == ["a", "c[1]"]
    with pytest.raises(CorpusError, match="given twice"):
        texts(tmp_path / "*.jsonl", tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("item", "kwargs", "message"),
    [
        ("missing.jsonl", {}, "no such file, and no file matches"),
        ("tree", {}, "say which text files in it with --glob"),
        ("tree", {"glob": "*.rs"}, "0 files match --glob"),
        ("tree", {"glob": "/etc/*"}, "not a pattern relative to the folder"),
        ("tree", {"glob": "**/*.py", "exclude": ["*"]}, "6 files match --glob .*, none is left"),
        ("tree/note.txt", {"glob": "**/*.py"}, "no --input is a folder"),
    ],
)
def test_wrong_selections(tree, item, kwargs, message):
    with pytest.raises(CorpusError, match=message):
        texts(tree.parent / item, **kwargs)
