"""Check every causal language model of transformers: it equals eager, or is refused. Prints the table: pytest -s -m long."""

import pytest

from tests.train import every_model


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("realm")
def test_no_model_trains_with_other_numbers():
    results = list(every_model.main([]).values())
    assert "differs" not in results
    assert results.count("trains") >= 70
