"""Random model configs: logits by formulas in float64, packed rows, decoding, four devices, export to PyTorch.

benchmarks/random_models.py checks as many as wanted.
"""

import pytest
import random_models


@pytest.mark.parametrize("seed", [
    pytest.param(seed, marks=() if seed < 4 else pytest.mark.slow) for seed in range(40)])
def test_a_random_model(seed, tmp_path):
    print(random_models.describe(seed))
    random_models.check(seed, tmp_path / "exported")
