import os

from hypothesis import settings

settings.register_profile("default", deadline=None, max_examples=30, derandomize=bool(os.environ.get("CI")))
settings.load_profile("default")
