"""Fixtures of these tests."""

from tests.adapters import config, hf_dir
from tests.tiny_models import tiny_folder

__all__ = ["config", "hf_dir", "tiny_folder"]
