"""`composer export`: a folder that holds the model's weights."""

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


# The folder loads as any Hugging Face model, in the type that was asked for.
@pytest.mark.slow
def test_folder(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "out"
    assert main(["tiny", "-o", str(target), "--dtype", "float32"]) == 0
    assert f"wrote {target}" in capsys.readouterr().out
    source = load_file(resolve_model("tiny") / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.float32
    assert all(torch.equal(model.state_dict()[name], tensor.float()) for name, tensor in source.items())
    assert AutoTokenizer.from_pretrained(target).chat_template
    with pytest.raises(ConfigError, match="exists already"):
        main(["tiny", "-o", str(target)])


# A checkpoint's model, not the one that the run began with; a step without a checkpoint names those there are.
@pytest.mark.slow
def test_checkpoint_of_a_run(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    run_dir = RunDir(tmp_path / "run")
    config = resolve(["@", "configs/a1.toml", "--trainer.device", "cpu"])
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
    with pytest.raises(ConfigError, match=r"--step 2.*step 3"):
        main([str(run_dir.root), "--step", "2", "-o", str(target)])
    with pytest.raises(ConfigError, match="tiny is no run directory"):
        main(["tiny", "--step", "3", "-o", str(target)])
    assert main([str(run_dir.root), "--step", "3", "-o", str(target), "--dtype", "float32"]) == 0
    source, written = (load_file(path / "model.safetensors") for path in (resolve_model("tiny"), target))
    assert all(torch.equal(written[name], 2.0 * tensor.float()) for name, tensor in source.items())
