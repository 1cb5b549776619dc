"""Every kind of error in a matrix: the exact words, the place, the nearest name, and all of a file at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_kvcheck.matrix.problems import MatrixError
from tests.matrix_helpers import cells_of, problems_of

HEAD = "kvcheck: 1\nmodel: {path: ./tiny}\nworkloads: [kv-inheritance]\n"

# What follows HEAD (so it starts on line 4), and the only problem that it has.
IN_BODY = {
    "unknown top-level key": (
        "cell: {a: {}}\ncells: {a: {}}",
        "m.yaml:4:1: expected a known key, found 'cell'; did you mean 'cells'?",
    ),
    "unknown feature": (
        "cells: {a: {pagesize: 16}}",
        "m.yaml:4:13: expected a known key, found 'pagesize'; did you mean 'page_size'?",
    ),
    "unknown key that is near none": (
        "cells: {a: {retract: {zzz: 1}}}",
        "m.yaml:4:23: expected a known key, found 'zzz'; the keys here are interval",
    ),
    "unknown key in a cell called as a feature": (
        "cells: {retract: {retract: {intervall: 1}}}",
        "m.yaml:4:29: expected a known key, found 'intervall'; did you mean 'interval'?",
    ),
    "text for a number": (
        "cells: {a: {page_size: '16'}}",
        "m.yaml:4:24: expected a whole number, found '16'",
    ),
    "fraction for a whole number": (
        "cells: {a: {page_size: 1.5}}",
        "m.yaml:4:24: expected a whole number, found 1.5",
    ),
    "truth for a number": (
        "cells: {a: {page_size: true}}",
        "m.yaml:4:24: expected a whole number, found true",
    ),
    "YAML 1.2: off is text": (
        "cells: {a: {mixed_chunk: off}}",
        "m.yaml:4:26: expected true or false, found 'off'",
    ),
    "zero": ("cells: {a: {max_running: 0}}", "m.yaml:4:26: expected a number of at least 1, found 0"),
    "absurd size": (
        "cells: {a: {pool_tokens: 99999999999}}",
        "m.yaml:4:26: expected a number of at most 2147483647, found 99999999999",
    ),
    "share above one": (
        "cells: {a: {gpu_memory: 1.5}}",
        "m.yaml:4:25: expected a number of at most 1.0, found 1.5",
    ),
    "not a number": ("cells: {a: {gpu_memory: .nan}}", "m.yaml:4:25: expected a finite number, found nan"),
    "scalar for a map": ("cells: {a: {retract: 3}}", "m.yaml:4:22: expected a map, found 3"),
    "list for a map": ("cells: [a]", "m.yaml:4:8: expected a map, found a list"),
    "cell that is no map": ("cells: {a: 3}", "m.yaml:4:12: expected a map, found 3"),
    "unknown engine": (
        "engine: sglan\ncells: {a: {}}",
        "m.yaml:4:9: expected 'reference', 'sglang' or 'vllm', found 'sglan'; did you mean 'sglang'?",
    ),
    "unknown engine overlay": (
        "cells: {a: {}}\nengines: {vlm: {}}",
        "m.yaml:5:11: expected 'reference', 'sglang' or 'vllm', found 'vlm'; did you mean 'vllm'?",
    ),
    "unknown algorithm": (
        "cells: {a: {speculative: {algorithm: EAGEL}, model: {path: ./tiny, draft: ./tiny}}}",
        "m.yaml:4:38: expected 'EAGLE', 'EAGLE3', 'NEXTN', 'STANDALONE' or 'NGRAM', found 'EAGEL'; "
        "did you mean 'EAGLE'?",
    ),
    "exercise": (
        "cells: {a: {exercise: never}}",
        "m.yaml:4:23: expected 'required' or 'optional', found 'never'",
    ),
    "environment value": (
        "cells: {a: {env: {A: [1]}}}",
        "m.yaml:4:22: expected text, found a list",
    ),
    "command as text": (
        "cells: {a: {command: python -m x}}",
        "m.yaml:4:22: expected a list, found 'python -m x'",
    ),
    "empty command": (
        "cells: {a: {command: []}}",
        "m.yaml:4:22: expected a list with at least 1 entry, found a list",
    ),
    "known without a date": (
        "cells: {a: {known: {kind: K01, page: p.md}}}",
        "m.yaml:4:20: expected the key 'until', found none",
    ),
    "known with a wrong date": (
        "cells: {a: {known: {kind: K01, page: p.md, until: soon}}}",
        "m.yaml:4:51: expected a date such as 2027-03-31, found 'soon'",
    ),
    "known crash without its words": (
        "cells: {a: {known: [{kind: K00, page: p.md, until: 2027-01-01}]}}",
        "m.yaml:4:21: expected K00 with the words of the finding as text, found a map",
    ),
    "known of no kind": (
        "cells: {a: {known: [{kind: K26, page: p.md, until: 2027-01-01}]}}",
        "m.yaml:4:28: expected a fault kind from 'K01' to 'K25', found 'K26'",
    ),
    "unknown workload": (
        "cells: {a: {workloads: [kv-inheritence]}}",
        "m.yaml:4:25: expected a workload or 'all', found 'kv-inheritence'; did you mean 'kv-inheritance'?",
    ),
    "unknown parameter": (
        "cells: {a: {workloads: [{kv-inheritance: {turn: 4}}]}}",
        "m.yaml:4:43: expected a parameter of 'kv-inheritance', found 'turn'; did you mean 'turns'?",
    ),
    "parameter of a workload without any": (
        "cells: {a: {workloads: [{pre-abort: {x: 4}}]}}",
        "m.yaml:4:38: expected a parameter of 'pre-abort', found 'x'; its parameters are none",
    ),
    "parameter that is no scalar": (
        "cells: {a: {workloads: [{kv-inheritance: {turns: [4]}}]}}",
        "m.yaml:4:50: expected a number, text, true or false, found a list",
    ),
    "workload twice": (
        "cells: {a: {workloads: [pre-abort, {pre-abort: {}}]}}",
        "m.yaml:4:36: expected each workload once in a cell, found 'pre-abort' a second time",
    ),
    "two workloads in one entry": (
        "cells: {a: {workloads: [{pre-abort: {}, kv-inheritance: {}}]}}",
        "m.yaml:4:25: expected one workload an entry, found 2; start each with its own '-'",
    ),
    "cell name": (
        "cells: {a/b: {}}",
        "m.yaml:4:9: expected a cell name of letters, digits and . _ + = , : - that starts with a letter "
        "or digit, found 'a/b'",
    ),
    "number as a cell name": (
        "cells: {16: {}}",
        'm.yaml:4:9: expected text as a key, found 16; write "16" in quotes if it is a name',
    ),
    "duplicate key": (
        "cells:\n  a: {}\n  b: {}\n  a: {}",
        "m.yaml:7:3: expected each key once, found 'a' a second time; it stands first at m.yaml:5:3",
    ),
    "no cells": ("family: x", "m.yaml:1:1: expected at least one cell under 'cells' (or 'axes'), found none"),
    "no workload in the list": (
        "cells: {a: {workloads: []}}",
        "m.yaml:4:24: expected a list with at least 1 entry, found a list",
    ),
    "all cells excluded": (
        "cells: {a: {}}\nexclude: [{cell: a}]",
        "m.yaml:5:1: expected at least one cell that is left, found all excluded",
    ),
    "exclude of an unknown cell": (
        "cells: {baseline: {}}\nexclude: [{cell: basline}]",
        "m.yaml:5:18: expected the name of a cell, found 'basline'; did you mean 'baseline'?",
    ),
    "exclude by what is no axis": (
        "cells: {a: {}}\naxes: {page_size: [1, 2]}\nexclude: [{max_running: 3}]",
        "m.yaml:6:12: expected 'cell' or an axis, found 'max_running'; the axes are page_size",
    ),
    "include for an unknown cell": (
        "cells: {baseline: {}}\ninclude: [{cell: base-line, page_size: 4}]",
        "m.yaml:5:18: expected the name of a cell, found 'base-line'; did you mean 'baseline'?",
    ),
    "empty include": (
        "cells: {a: {}}\ninclude: [{}]",
        "m.yaml:5:11: expected at least one key, found an empty entry",
    ),
    "include of a name that is there": (
        "cells: {a: {}}\ninclude: [{name: a, page_size: 4}]",
        "m.yaml:5:11: expected each cell name once, found 'a' a second time; first at m.yaml:4:9",
    ),
    "unknown axis": (
        "cells: {a: {}}\naxes: {page-size: [1]}",
        "m.yaml:5:8: expected a known key, found 'page-size'; did you mean 'page_size'?",
    ),
    "axis without values": (
        "cells: {a: {}}\naxes: {page_size: []}",
        "m.yaml:5:19: expected a list with at least 1 entry, found a list",
    ),
    "axis of wrong type": (
        "cells: {a: {}}\naxes: {page_size: [1, x]}",
        "m.yaml:5:23: expected a whole number, found 'x'",
    ),
    "chunk that is no multiple of the page": (
        "cells: {a: {page_size: 256, chunked_prefill: 128}}",
        "m.yaml:4:46: expected a chunked_prefill that page_size 256 divides, found 128 in cell 'a'; "
        "the next is 256",
    ),
    "one wrong default shows in many cells": (
        "defaults: {chunked_prefill: 100}\ncells: {a: {page_size: 16}, b: {page_size: 16}}",
        "m.yaml:4:29: expected a chunked_prefill that page_size 16 divides, found 100 in cell 'a'; "
        "the next is 112",
    ),
    "pool below a page": (
        "cells: {a: {page_size: 256, pool_tokens: 128}}",
        "m.yaml:4:42: expected a pool_tokens of at least one page of 256, found 128 in cell 'a'",
    ),
    "mixed chunk without chunks": (
        "cells: {a: {mixed_chunk: true, chunked_prefill: null}}",
        "m.yaml:4:26: expected a chunked_prefill beside mixed_chunk, found none in cell 'a'",
    ),
    "speculation without a draft": (
        "cells: {a: {speculative: {}}}",
        "m.yaml:4:26: expected a 'draft' in the model for EAGLE, found none in cell 'a'; "
        "give model: {path: ..., draft: ...}",
    ),
    "overlap of v1": (
        "cells: {a: {speculative: {algorithm: NGRAM, version: v1, overlap: true}}}",
        "m.yaml:4:67: expected 'overlap: false' with 'version: v1', found true; only v2 overlaps",
    ),
    "model of a cell that is not there": (
        "cells: {a: {model: ./tinny}}",
        "m.yaml:4:20: expected a model folder (relative to this file) or a hub id such as org/name, "
        "found no folder './tinny'; did you mean 'tiny'?",
    ),
    "alias inside itself": (
        "cells: {a: &x {args: {y: *x}}}",
        "m.yaml:4:12: expected a finite configuration, found an alias inside itself",
    ),
}

# Whole files.
FILES = {
    "empty": (b"", "m.yaml:1:1: expected a matrix that starts with 'kvcheck: 1', found an empty file"),
    "only comments": (
        b"# x\n",
        "m.yaml:1:1: expected a matrix that starts with 'kvcheck: 1', found an empty file",
    ),
    "a list": (b"# x\n- a\n", "m.yaml:2:1: expected a map that starts with 'kvcheck: 1', found a list"),
    "text": (b"hello\n", "m.yaml:1:1: expected a map that starts with 'kvcheck: 1', found 'hello'"),
    "version missing": (
        b"model: ./tiny\nworkloads: all\ncells: {a: {}}",
        "m.yaml:1:1: expected 'kvcheck: 1', the version of the format, found no such key",
    ),
    "version of the future": (
        b"kvcheck: 2\nmodel: ./tiny\nworkloads: all\ncells: {a: {}}",
        "m.yaml:1:10: expected 'kvcheck: 1', the version of the format, found 2; "
        "later versions need a later pytest-kvcheck",
    ),
    "version as text": (
        b"kvcheck: '1'\nmodel: ./tiny\nworkloads: all\ncells: {a: {}}",
        "m.yaml:1:10: expected 'kvcheck: 1', the version of the format, found '1'",
    ),
    "no model": (
        b"kvcheck: 1\nworkloads: all\ncells: {a: {}, b: {}}",
        "m.yaml:1:1: expected a model, at the top or in every cell: model: {path: ...}, found none",
    ),
    "no workloads": (
        b"kvcheck: 1\nmodel: ./tiny\ncells: {a: {}, b: {}}",
        "m.yaml:1:1: expected workloads, at the top or in every cell, found none",
    ),
    "model folder missing": (
        b"kvcheck: 1\nmodel: {path: ../nowhere/llama}\nworkloads: all\ncells: {a: {}}",
        "m.yaml:2:15: expected a model folder (relative to this file) or a hub id such as org/name, "
        "found no folder '../nowhere/llama'",
    ),
    "unclosed map": (
        b"kvcheck: 1\ncells: {a: 1\n",
        "m.yaml:3:1: expected valid YAML, found while parsing a flow mapping, expected ',' or '}', but got "
        "'<stream end>'",
    ),
    "tab": (
        b"kvcheck: 1\ncells:\n\ta: 1\n",
        "m.yaml:3:1: expected valid YAML, found while scanning for the next token, found character '\\t' that "
        "cannot start any token",
    ),
    "two documents": (
        b"kvcheck: 1\n---\nkvcheck: 1\n",
        "m.yaml:2:1: expected valid YAML, found expected a single document in the stream, but found another "
        "document",
    ),
    "not UTF-8": (
        b"kvcheck: 1\n# caf\xe9\n",
        "m.yaml:2:6: expected valid YAML in UTF-8, found invalid continuation byte",
    ),
    "control character": (
        b"kvcheck: 1\nfamily: a\x00b\n",
        "m.yaml:2:10: expected valid YAML in UTF-8, found special characters are not allowed",
    ),
    "python tag": (
        b"kvcheck: 1\ncells: !!python/object:os.system {}\n",
        "m.yaml:2:8: expected valid YAML, found could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object:os.system'",
    ),
    "nested without end": (
        b"kvcheck: " + b"[" * 20000,
        "m.yaml:1:1: expected valid YAML, found values nested too deeply to read",
    ),
}


@pytest.mark.parametrize("name", IN_BODY)
def test_error_in_a_matrix(name: str, tmp_path: Path) -> None:
    body, expected = IN_BODY[name]
    assert problems_of(tmp_path, HEAD + body) == [expected]


@pytest.mark.parametrize("name", FILES)
def test_error_of_a_file(name: str, tmp_path: Path) -> None:
    text, expected = FILES[name]
    assert problems_of(tmp_path, text) == [expected]


def test_all_errors_of_a_file_come_at_once_in_its_order(tmp_path: Path) -> None:
    text = """\
        kvcheck: 1
        model: ./tiny
        engine: vlm
        cells:
          a: {page_siz: 16, retract: {intervl: 3}}
          a: {}
          b: {workloads: [3, kv-inheritence, {pre-abort: {x: 1}}]}
        exclude: [{cell: c}]
        workloads: all
        """
    problems = problems_of(tmp_path, text)
    places = [problem.split(" ")[0] for problem in problems]
    assert places == [
        f"m.yaml:{place}:" for place in ("3:9", "5:7", "5:31", "6:3", "7:19", "7:22", "7:51", "8:18")
    ]


def test_missing_file_and_folder_are_matrix_errors(tmp_path: Path) -> None:
    from pytest_kvcheck.matrix.loader import load

    for path, words in ((tmp_path / "no.yaml", "no such file or directory"), (tmp_path, "is a directory")):
        with pytest.raises(MatrixError, match=words):
            load(path, engine=None, device="cpu", workload_names={})


def test_alias_bomb_is_refused_quickly(tmp_path: Path) -> None:
    lines = ["kvcheck: 1", "args0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"args{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (problem,) = problems_of(tmp_path, "\n".join(lines))
    assert "expected a finite configuration, found more than 100000 values" in problem


def test_a_clean_matrix_has_no_problems(tmp_path: Path) -> None:
    assert len(cells_of(tmp_path, HEAD + "cells: {a: {}}")) == 1
