"""Verdicts on excerpts of public issue threads and on logs (`corpus/*.toml`), each with the cause that a person gave it."""

from pathlib import Path

import pytest

from dlrover.master.diagnosis_rules import causes, table
from tests.support.corpus import Case, Log, read, read_logs

CORPUS = Path(__file__).parent / "corpus"
CASES = read(CORPUS / "public.toml")
LATER = read(CORPUS / "later.toml")
LOGS = [
    log for name in ("blind", "families", "own_words") for log in read_logs(CORPUS / f"{name}.toml")
]

NOT_YET: frozenset[str] = frozenset()
"""Threads whose excerpt is not understood."""


def test_the_corpus_is_large_and_names_causes_that_exist():
    assert len(CASES) >= 60
    assert {case.cause for case in (*CASES, *LATER)} <= causes()
    assert len({case.source for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", [*CASES, *LATER], ids=lambda case: case.source)
def test_the_verdict_is_the_one_a_person_gave(case: Case):
    verdict = case.verdict()
    right = (verdict.cause, verdict.origin) == (case.cause, case.origin)
    assert right is (case.source not in NOT_YET), verdict


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.id)
def test_a_log_is_read_as_a_person_reads_it(log: Log):
    verdict = table().diagnose_log(log.text)
    assert verdict.cause in log.causes, verdict
    assert verdict.origin in log.origins, verdict
