"""The tokenizer of the shipped checkpoint, loaded once."""

from __future__ import annotations

from dsv4lite.config import tiny_model
from dsv4lite.text.tokenizer import Tokenizer

SHIPPED = Tokenizer.from_folder(tiny_model())
