"""The lab's tests share the fixtures and hooks of the others."""
from tests.conftest import *  # noqa: F403
