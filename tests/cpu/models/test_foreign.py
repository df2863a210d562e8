"""What foreign code raises is told in one line that names the file; faults of packgraph are not."""

import json
import math
import os

import pytest
import torch

from packgraph.models.foreign import naming, read_object
from packgraph.packing.capacity import Capacity
from packgraph.train.data.source import BadDocumentError, DataError


def raising(error):
    """Foreign code that raises an error."""
    names = {"__name__": "somebody.elses", "error": error}
    exec("def raises():\n    raise error", names)
    return names["raises"]


def told(run) -> str:
    block = naming("a/file", "cannot be read", DataError, "mend it")
    with pytest.raises(DataError) as found, block:
        run()
    assert found.value.__cause__ is not None
    return str(found.value)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KeyError("evil"), "KeyError: 'evil'"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (ValueError("two\n  lines."), "two lines"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (RecursionError("maximum"), "nested too deeply"),
        (Exception("bare"), "bare"),
        (json.JSONDecodeError("no", "{", 1), "JSONDecodeError: no: line 1 column 2 (char 1)"),
        (AssertionError(), "AssertionError: "),
    ],
)
def test_whatever_foreign_code_raises_is_one_line(error, says):
    assert told(raising(error)) == f"a/file: cannot be read: {says}; mend it"


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (lambda: Capacity("a", 2), ValueError),  # raised in a function of packgraph
        (raising(BadDocumentError("here: bad")), BadDocumentError),
        (raising(KeyboardInterrupt()), KeyboardInterrupt),
        (raising(torch.OutOfMemoryError("no memory")), torch.OutOfMemoryError),
    ],
)
def test_faults_and_errors_of_packgraph_keep_their_class(run, kind):
    with (
        pytest.raises(kind) as found,
        naming("a/file", "cannot be read", lambda text: AssertionError(text)),
    ):
        run()
    assert found.type is not AssertionError


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        ("null", "holds a NoneType"),
        ("[" * 99_999, "nested too deeply"),
        ('{"a": [NaN]}', "NaN"),
        ('{"a": ' + "9" * 9999 + "}", "not valid JSON"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_what_is_no_object_is_named(tmp_path, content, says):
    file = tmp_path / "x.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=rf"x\.json: .*{says}.*repair it or remove it"):
        read_object(file, DataError)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, says in (("pipe", "it is no file"), ("none", "there is no such file")):
        with pytest.raises(DataError, match=says):
            read_object(tmp_path / name, DataError)
    (tmp_path / "disk").symlink_to("/proc/self/mem")  # reading it fails
    with pytest.raises(DataError, match="Input/output error"):
        read_object(tmp_path / "disk", DataError)
    (tmp_path / "good").write_text('{"a": [1, -Infinity]}')
    assert read_object(tmp_path / "good", DataError) == {"a": [1, -math.inf]}
