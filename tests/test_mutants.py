from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_still_break_the_engine_and_name_a_test_that_exists(mutant: Mutant) -> None:
    """`python tests/mutants.py` runs them; this keeps its list in step with the code."""
    assert (ROOT / mutant.file).read_text().count(mutant.text) == 1
    assert mutant.broken != mutant.text
    file, _, test = mutant.test.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text()


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
