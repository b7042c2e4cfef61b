"""Searching a text for the expressions of a table."""

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dlrover.master.diagnosis_rules import built_in
from dlrover.master.machine.diagnosis.match import last_match, occurs, search

CORPUS = [path.read_text().lower() for path in (Path(__file__).parent / "corpus").glob("*.toml")]
LINES = [line for text in CORPUS for line in text.splitlines() if len(line) > 20]
EXPRESSIONS = sorted({e for rule in built_in() for e in (rule.text, rule.facts) if e})


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_row_is_found_wherever_its_expression_matches(expression):
    plain = re.compile(expression, re.IGNORECASE | re.MULTILINE)
    for line in LINES:
        assert occurs(expression, line) == (plain.search(line) is not None), line


@given(st.text("ab|()?*+.[]\\{0,2}^$", max_size=12), st.text("ab\n", max_size=8))
def test_any_expression_is_found_where_it_matches(expression, text):
    try:
        pattern = re.compile(expression, re.MULTILINE)
    except (re.error, OverflowError):
        return
    assert occurs(expression, text) == (pattern.search(text) is not None)


def test_what_was_found_is_shown_in_its_own_case():
    assert search("no (space)", "No Space left")[1] == "Space"
    assert last_match("e", "one, two, three").start() == 14
    assert last_match("x", "one") is None
