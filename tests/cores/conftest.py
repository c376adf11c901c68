"""Fixtures of these tests."""

from tests.tiny_models import tiny_folder

__all__ = ["tiny_folder"]
