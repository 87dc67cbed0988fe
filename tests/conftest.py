"""The fixtures of all tests: tests/fixtures.py."""

from fixtures import *  # noqa: F403
