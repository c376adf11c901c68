"""Fixtures of these tests."""

from tests.tiny_models import fp8_folder, tiny_folder

__all__ = ["fp8_folder", "tiny_folder"]
