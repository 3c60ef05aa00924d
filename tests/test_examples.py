"""The examples in docstrings run and say the truth."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(("module", "at_least"), [("mlx_linattn.ops.recurrence", 10)])
def test_docstring_examples(module, at_least):
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0 and result.attempted >= at_least
