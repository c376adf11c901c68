"""Fixtures of these tests."""

from tests.adapters import config, hf_dir
from tests.tiny_models import fp8_folder, tiny_folder

__all__ = ["config", "fp8_folder", "hf_dir", "tiny_folder"]
