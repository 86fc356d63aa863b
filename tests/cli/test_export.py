"""`composer export`: a folder and a GGUF file that hold the model's weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from composer_prime.cli.export_command import main
from composer_prime.config.load import dump, resolve
from composer_prime.errors import ConfigError
from composer_prime.model_source import resolve_model
from composer_prime.run.run_dir import RunDir
from trainer import world as worlds
from trainer.model.build import build_policy


# The folder loads as any Hugging Face model, in the type and the shards that were asked for.
@pytest.mark.slow
def test_folder(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "out"
    assert main(["tiny", "-o", str(target), "--dtype", "float32", "--shard-size", "2MB"]) == 0
    assert len(list(target.glob("*.safetensors"))) > 1
    assert f"to {target}" in capsys.readouterr().out
    source = load_file(resolve_model("tiny") / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.float32
    assert all(torch.equal(model.state_dict()[name], tensor.float()) for name, tensor in source.items())
    assert AutoTokenizer.from_pretrained(target).chat_template
    with pytest.raises(ConfigError, match="exists already"):
        main(["tiny", "-o", str(target)])


# The GGUF file has every tensor, the tokens of every row, the head size and the chat template.
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gguf_of_qwen3(tmp_path, dtype, capsys):
    gguf = pytest.importorskip("gguf", reason="GGUF needs the extra gguf")
    target = tmp_path / "tiny.gguf"
    assert main(["tiny", "-o", str(target), "--dtype", dtype]) == 0
    assert "compare token ids" in capsys.readouterr().out  # The embedded tokenizer splits as no known one.
    reader = gguf.GGUFReader(target)
    source = load_file(resolve_model("tiny") / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(source)
    query = source["model.layers.2.self_attn.q_proj.weight"]
    written = gguf.dequantize(tensors["blk.2.attn_q.weight"].data, tensors["blk.2.attn_q.weight"].tensor_type)
    assert np.array_equal(written, query.to(getattr(torch, dtype)).float().numpy())
    norm = tensors["blk.0.attn_q_norm.weight"]
    assert norm.data.dtype == np.float32
    assert reader.fields["qwen3.attention.key_length"].contents() == 64
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == 576
    assert "im_start" in reader.fields["tokenizer.chat_template"].contents()


# transformers reads a Qwen2 file back to the same model.
@pytest.mark.slow
def test_gguf_of_qwen2_is_read_back(tmp_path):
    pytest.importorskip("gguf", reason="GGUF needs the extra gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = Qwen2Config(vocab_size=576, num_key_value_heads=2, max_position_embeddings=128, **sizes)
    model, folder = Qwen2ForCausalLM(config).eval(), tmp_path / "qwen2"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("tiny")).save_pretrained(folder)
    assert main([str(folder), "-o", str(tmp_path / "q.gguf"), "--dtype", "float32"]) == 0
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="q.gguf").eval()
    ids = torch.arange(3, 20)[None]
    assert torch.allclose(read(ids).logits, model(ids).logits, atol=1e-5)


# Another architecture is refused with the way to go, and leaves no file.
def test_other_architecture(tmp_path, monkeypatch):
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"is a LlamaForCausalLM.*convert_hf_to_gguf\.py"):
        main([str(folder), "-o", str(tmp_path / "model.gguf")])
    assert not (tmp_path / "model.gguf").exists()


# A checkpoint's model, not the one that the run began with; a step without a checkpoint names those there are.
@pytest.mark.slow
def test_checkpoint_of_a_run(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    run_dir = RunDir(tmp_path / "run")
    config = resolve(["@", "configs/a1.toml", "--trainer.device", "cpu"]).config
    (folder := run_dir.checkpoint(3)).mkdir(parents=True)
    run_dir.config.write_text(dump(config))
    try:
        policy = build_policy(config, resolve_model("tiny"), worlds.join(config.trainer))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(2.0)
        dcp.save({"model": get_model_state_dict(policy)}, checkpoint_id=folder / "trainer")
    finally:
        worlds.leave()
    (folder / "COMPLETE").touch()
    target = tmp_path / "out"
    with pytest.raises(ConfigError, match="the kept ones are of step 3"):
        main([str(run_dir.root), "--step", "2", "-o", str(target)])
    with pytest.raises(ConfigError, match="tiny is not a run directory"):
        main(["tiny", "--step", "3", "-o", str(target)])
    assert main([str(run_dir.root), "--step", "3", "-o", str(target), "--dtype", "float32"]) == 0
    source, written = (load_file(path / "model.safetensors") for path in (resolve_model("tiny"), target))
    assert all(torch.equal(written[name], 2.0 * tensor.float()) for name, tensor in source.items())
