"""With ONLINENORM_ECOSYSTEM=all a missing package is an error, so that nothing is skipped unseen."""

import importlib
import os

import pytest


def needs(name):
    """Import what a file of tests is about. Where it is missing, the tests are skipped, or an error if all must run."""
    if os.environ.get("ONLINENORM_ECOSYSTEM") == "all":
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed; tools/ecosystem.sh runs these tests with it")
