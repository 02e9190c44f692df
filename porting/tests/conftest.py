"""These tests share the fixtures and hooks of the library's."""
from tests.conftest import *  # noqa: F403
