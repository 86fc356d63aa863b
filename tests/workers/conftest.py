"""A model folder with a small byte-level tokenizer, and workers that can import the plugins of this folder."""

import os
import sys
from pathlib import Path

import pytest
from tokenizers_made import write_tokenizer

PLUGINS = Path(__file__).parent / "plugins"


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session", autouse=True)
def _plugins_importable() -> None:
    sys.path[:0] = [str(PLUGINS)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PLUGINS), os.environ.get("PYTHONPATH")]))
