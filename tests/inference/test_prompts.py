"""Prompts of the command line and of files: every mistake is a line with the place of the prompt."""

import random
from pathlib import Path

import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.inference.prompts import encode_prompts, read_prompts, stop_ids
from flax_mesh.inference.tokenizer import Bytes


def refused(call, *arguments) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return caught.value.lines


def rows_of(path: Path) -> list[list[int]]:
    return [row.tolist() for row in encode_prompts(read_prompts([], str(path)), Bytes(), 256)]


def test_command_line_prompts_come_before_prompts_in_a_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("one\r\ntwo {\n é\n".encode())
    found = read_prompts(["first"], str(path))
    assert [prompt.text for prompt in found] == ["first", "one", "two {", " é"]
    assert found[1].name == f"--prompts {path}, line 1"
    assert rows_of(path)[2] == [*" é".encode()]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a\\nb"}\n{"tokens": [3, 1]}')
    assert rows_of(tmp_path / "prompts.jsonl") == [[97, 10, 98], [3, 1]]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_the_name_of_a_file_says_what_its_lines_are(tmp_path, mark):
    for name, line, expected in (
        ("a.txt", "one", [*b"one"]),
        ("a.jsonl", '{"prompt": "one"}', [*b"one"]),
        ("a.NDJSON", '{"tokens": [1]}', [1]),
    ):
        (tmp_path / name).write_bytes(mark + f"{line}\n".encode())
        assert rows_of(tmp_path / name) == [expected]
    (tmp_path / "a.json").write_bytes(mark + b'[\n{"prompt": "one"}\n]\n')
    (problem,) = refused(read_prompts, [], str(tmp_path / "a.json"))
    assert "a.json: a file has a prompt in every line; name it .jsonl" in problem
    (tmp_path / "empty.txt").write_bytes(mark)
    assert "empty.txt has no line" in refused(read_prompts, [], str(tmp_path / "empty.txt"))[0]


def test_every_wrong_line_is_reported_with_its_number(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = ["nope", '{"x": 1}', '{"tokens": "a"}', "", '{"prompt": 3}', '{"tokens": [1.0]}', "[1]"]
    lines += ['{"prompt": "\\ud800"}', '{"tokens": [true]}', '{"tokens": [1], "prompt": "a"}', "[" * 9999]
    path.write_text("\n".join(['{"prompt": "good"}', *lines, ""]))
    problems = refused(read_prompts, ["a\udcff"], str(path))
    assert problems[0] == "--prompt is not UTF-8; use other characters"
    assert [f", line {n}" in problem for n, problem in enumerate(problems[1:], start=2)] == [True] * 11
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"a\n\xff\nb")
    assert refused(read_prompts, [], str(path)) == [f"--prompts {path}, line 2 is not UTF-8 text; convert the file"]


def test_prompts_that_the_model_cannot_read_are_reported_together(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"tokens": [1, 300]}\n{"tokens": []}\n{"prompt": ""}\n{"tokens": [-1]}\n')
    problems = refused(encode_prompts, read_prompts([], str(path)), Bytes(), 256)
    assert problems == [
        f"--prompts {path}, line 1 has the token 300; the ids of this model are 0 to 255",
        f"--prompts {path}, line 2 is empty; it must have at least one token",
        f"--prompts {path}, line 3 is empty; it must have at least one token",
        f"--prompts {path}, line 4 has the token -1; the ids of this model are 0 to 255",
    ]
    (problem,) = refused(encode_prompts, read_prompts(["a", "b"], None), None, 256)
    assert problem.startswith("--prompt number 1 is text, but the model has no tokenizer")


def test_missing_files_and_prompts_are_one_line(tmp_path):
    assert "there is no prompt; pass --prompt TEXT" in refused(read_prompts, [], None)[0]
    assert "cannot be read: No such file" in refused(read_prompts, [], str(tmp_path / "nothing"))[0]
    assert "cannot be read: it must be a file, but is a folder" in refused(read_prompts, [], str(tmp_path))[0]
    assert "null byte" in refused(read_prompts, [], "a\0b")[0]


def test_a_stop_is_an_id_or_a_text_of_one_token():
    assert stop_ids(["10", "\n", "x", "0"], Bytes(), 256) == [10, 10, 120, 0]
    assert stop_ids(["7"], None, 8) == [7]
    problems = refused(stop_ids, ["ab", "256", "é", "", "9" * 30, "-1"], Bytes(), 256)
    assert len(problems) == 6
    assert problems[0] == "--stop 'ab' must be one token, got 2; pass one of its tokens, or an id"
    assert problems[1] == "--stop 256 is no token; the ids of this model are 0 to 255"
    assert refused(stop_ids, ["a"], None, 8) == ["--stop 'a' must be a token id: the model has no tokenizer"]


def test_random_files_are_read_or_refused(tmp_path):
    draw, path, num_read = random.Random(0), tmp_path / "prompts.jsonl", 0
    right = ['{"prompt": "a"}', '{"tokens": [1, 2]}']
    pieces = ['{"prompt": ', '"a"', "}", "", '{"tokens": ', "[1, 2]", "[", "]", "1e999", "null", "\\ud800", "\0", "é"]
    for _ in range(300):
        lines = [draw.choice([*right, "".join(draw.choices(pieces, k=draw.randrange(5)))]) for _ in range(3)]
        path.write_text("\n".join(lines), encoding="utf-8")
        try:
            num_read += len(encode_prompts(read_prompts([], str(path)), Bytes(), 256)) > 0
        except ConfigError as error:
            assert all(len(problem) < 400 for problem in error.problems)
    assert 50 < num_read < 250
    path.write_text('{"prompt": "\\ud800"}')
    assert "prompt must be text" in refused(read_prompts, [], str(path))[0]
