"""From words on a command line to a configuration, and the messages when they are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from composer_prime.config.load import dump, make_importable, parse_command_line, read_config, resolve
from composer_prime.errors import ConfigError
from composer_prime.host import module_file

BASE = Path(__file__).with_name("base.toml").read_text()


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return str(path)


def overlay(folder: Path, text: str) -> str:
    path = folder / f"overlay-{len(list(folder.iterdir()))}.toml"
    path.write_text(text)
    return str(path)


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(list(words))
    return str(caught.value)


def test_later_overlays_and_then_flags_win(base, tmp_path):
    # base < overlay < command line, key by key.
    second = overlay(tmp_path, "[run]\nmax_steps = 20\nseed = 3\n")
    config = resolve(["@", base, "@", second, "--run.max_steps", "30"])
    assert (config.run.max_steps, config.run.seed, config.run.name) == (30, 3, "one")


def test_a_file_states_what_differs_from_its_base(base, tmp_path):
    # A chain of bases, each relative to its file: own values win, tables are merged, `base` itself is no key.
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/middle.toml").write_text('base = "../base.toml"\n[run]\nname = "two"\nseed = 5\n')
    (tmp_path / "sub/top.toml").write_text('base = "middle.toml"\n[run]\nname = "three"\n')
    config = resolve(["@", str(tmp_path / "sub/top.toml"), "--orchestrator.source.1.weight", "3"])
    assert (config.run.name, config.run.seed, config.run.max_steps) == ("three", 5, 10)
    assert config.orchestrator.source[1].weight == 3 and '"base"' not in dump(config)


def test_messages_name_the_file_of_a_chain_that_set_a_value(base, tmp_path):
    # The value is wrong in the base, so the base is named, not the file on the command line.
    Path(base).write_text(BASE.replace("max_steps = 10", "max_steps = -1"))
    top = overlay(tmp_path, 'base = "base.toml"\n[trainer.optim]\nlr = "fast"\n')
    text = refused("@", top)
    assert f"run.max_steps = -1 ({base}:4)" in text and f"trainer.optim.lr = 'fast' ({top}:3)" in text


def test_messages_name_the_line_of_a_value(base, tmp_path):
    # The line where the statement begins, as editors count: in a later element of a list, an inline table, or over
    # several lines.
    text = '[orchestrator.eval]\npass_k = [\n  1,\n  "two",\n]\n\n# note\u2028\n[trainer]\noptim = { lr = "fast" }\n'
    wrong = overlay(tmp_path, text)
    assert f"({wrong}:2)" in (said := refused("@", base, "@", wrong)) and f"({wrong}:9)" in said
    Path(base).write_text(BASE.replace('some.module" }', 'some.module" }\nwieght = 2'))
    assert f"unknown key orchestrator.source.1.wieght ({base}:14)" in refused("@", base)


def test_wrong_bases_are_refused(base, tmp_path):
    # A base that is missing, that leads back to its reader, or that is no path.
    missing = overlay(tmp_path, 'base = "bse.toml"\n')
    text = refused("@", missing)
    assert f"{missing}: base is 'bse.toml', but there is no file {tmp_path / 'bse.toml'}" in text and base in text
    assert "did you mean a1?" in refused("@", overlay(tmp_path, 'base = "a11.toml"\n'))
    (tmp_path / "one.toml").write_text('base = "two.toml"\n')
    (tmp_path / "two.toml").write_text('base = "./one.toml"\n')
    assert "base is './one.toml', which leads back to itself" in refused("@", str(tmp_path / "one.toml"))
    assert "base is ['base.toml']; expected the path" in refused("@", overlay(tmp_path, 'base = ["base.toml"]\n'))


def test_shipped_files_have_names(tmp_path):
    # `a1` is a shipped file wherever the command is typed, also as a base.
    assert resolve(["@", "smollm2/a1"]).model.path == "smollm2"
    own = overlay(tmp_path, 'base = "a1"\n[run]\nmax_steps = 3\n')
    config = resolve(["@", own])
    assert (config.run.name, config.run.max_steps) == ("a1", 3)
    assert "a shipped one: a1" in refused("@", "a11")


@pytest.mark.parametrize("flag", ["--run.max_steps", "--run.max-steps"])
def test_underscore_and_dash_are_the_same(base, flag):
    # Both spellings of a key set it, with a space or an equals sign.
    assert resolve(["@", base, flag, "7"]).run.max_steps == 7
    assert resolve(["@", base, f"{flag}=8"]).run.max_steps == 8


def test_lists_and_switches_on_the_command_line(base):
    # Lists take several words under either spelling; --no- turns a switch off; an optional section opens by its key.
    words = ["--orchestrator.eval.pass_k", "1", "2", "--orchestrator.eval.samples", "2", "--trainer.lora.rank", "4"]
    config = resolve(["@", base, *words, "--no-orchestrator.train_truncated"])
    assert config.orchestrator.eval.pass_k == [1, 2] and not config.orchestrator.train_truncated
    assert config.trainer.lora is not None and config.trainer.lora.rank == 4


def test_one_element_of_a_list_can_be_overridden(base):
    # Other elements and other keys of the element stay.
    words = ["--orchestrator.source.1.weight", "2.5", "--orchestrator.source.0.taskset.num_tasks=64"]
    first, second = resolve(["@", base, *words]).orchestrator.source
    assert (first.weight, second.weight) == (1.0, 2.5)
    assert first.taskset == {"id": "some.module", "num_tasks": 64}


def test_missing_element_is_named_with_the_count(base):
    # Overriding element 5 of 2 says how many there are.
    assert "no 5 in a list of 2" in refused("@", base, "--orchestrator.source.5.weight", "2")


def test_unknown_key_in_a_file_gets_a_suggestion_and_its_file(base, tmp_path):
    # The did-you-mean is a dotted key, with the position of a list's element; the file is named.
    written = '[run]\nmax_stepz = 3\n[[orchestrator.source]]\nname = "a"\nwieght = 2\ntaskset = {id = "x"}\n'
    text = refused("@", base, "@", (wrong := overlay(tmp_path, written)))
    assert "unknown key run.max_stepz" in text and "did you mean run.max_steps?" in text and wrong in text
    assert "orchestrator.source.0.wieght" in text and "did you mean orchestrator.source.0.weight?" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--diloco.outer 0.7", "set --diloco.outer.KEY, where KEY is one of lr, momentum"),
        ("--trainer.optim.typ muon", "did you mean --trainer.optim.type?"),
        ("--trainer.lr 1e-3", "did you mean --trainer.optim.lr?"),
        ("--trainer.optim.learning_rate 1", "did you mean --trainer.optim.lr or "),
        ("--orchestrator.sources a", "did you mean --orchestrator.source or "),
        ("--run.lr 1", "did you mean --trainer.optim.lr or --diloco.outer.lr?"),
        ("--monitor.colour red", "unknown option --monitor.colour; keys of [monitor]: "),
    ],
)
def test_remedies_stay_in_the_section(base, words, said):
    # One value for a section names the keys that it has; a key of a section below it, or of another, is found there.
    text = refused("@", base, *words.split(), "--run.nmae", "x")
    assert said in text and "did you mean --run.name?" in text


def test_wrong_values_name_key_value_place_and_expectation(base, tmp_path):
    # Every wrong value is listed, not only the first.
    wrong = overlay(tmp_path, '[trainer.optim]\nlr = "fast"\n')
    text = refused("@", base, "@", wrong, "--run.max_steps", "-3", "--trainer.optim.type", "sgd")
    assert "3 things are wrong" in text
    assert f"trainer.optim.lr = 'fast' ({wrong}:2): expected a valid number" in text
    assert "run.max_steps = '-3' (the command line): expected greater than or equal to 0" in text
    assert "expected adamw, muon" in text


def test_values_of_another_form_show_the_form(base, tmp_path):
    # A section where a list of them belongs, a name where a table belongs, a text where a list belongs.
    written = '[orchestrator.source]\nname = "a"\n[orchestrator.demonstrations]\nfiles = "a.jsonl"\n'
    text = refused("@", base, "@", overlay(tmp_path, written))
    assert "[[orchestrator.source]]" in text and "['a.jsonl']" in text
    written = '[[orchestrator.source]]\nname = "a"\ntaskset = "mine"\n'
    assert "{ id = 'mine' }" in refused("@", base, "@", overlay(tmp_path, written))


def test_missing_required_key_says_how_to_set_it(tmp_path):
    # model.path is in no layer.
    bare = overlay(tmp_path, BASE.replace('path = "tiny"\n', ""))
    assert "model.path is required" in refused("@", bare)


def test_cross_field_rules_are_plain_sentences(base):
    # No "Value error," prefix, both values, the remedy.
    text = refused("@", base, "--trainer.micro_batch_tokens", "64")
    assert text.startswith("trainer.micro_batch_tokens is 64") and "model.max_context = 512" in text
    text = refused("@", base, "--orchestrator.eval.pass_k", "1", "8")
    assert "orchestrator.eval.pass_k is [1, 8], but orchestrator.eval.samples is 1" in text
    assert text.endswith("set --orchestrator.eval.pass_k 1, or --orchestrator.eval.samples 8")
    text = refused("@", base, "--orchestrator.eval.pass_k", "0", "1")
    assert text.endswith("set --orchestrator.eval.pass_k 1")


def test_flash_attention_in_float32_is_refused(base):
    # It fails at the first step on every GPU.
    words = ["--model.attention", "flash_attention_2", "--trainer.compute_dtype"]
    with pytest.raises(ConfigError, match=r"trainer\.compute_dtype is 'float32'"):
        resolve([f"@{base}", *words, "float32"])
    assert resolve([f"@{base}", *words, "bfloat16"]).model.attention == "flash_attention_2"


def test_broken_toml_names_file_and_line(tmp_path):
    # The parser's line number is passed on.
    assert "line 1" in refused("@", overlay(tmp_path, "[run\n"))


def test_resume_and_dry_run_are_short_forms(base):
    # --resume sets run.resume; --dry-run is no key.
    config, dry_run = parse_command_line(["@", base, "--resume", "--dry-run"])
    assert config.run.resume and dry_run


def test_parse_prints_to_stderr_and_exits_with_2(base, capsys):
    # No traceback reaches the user.
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["@", base, "--run.nmae", "x"])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "did you mean --run.name?" in captured.err


def test_dump_and_read_give_the_same_configuration(base, tmp_path):
    # config.json holds everything that a role needs.
    config = resolve(["@", base, "--trainer.lora.rank", "2"])
    path = tmp_path / "config.json"
    path.write_text(dump(config))
    assert read_config(path) == config


def test_read_explains_what_is_wrong(tmp_path):
    # A missing or foreign config.json is a message, not a traceback.
    with pytest.raises(ConfigError, match=r"trainer @ file\.toml"):
        read_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"run": {"name": "a", "colour": 1}}')
    with pytest.raises(ConfigError, match=r"unknown key run\.colour"):
        read_config(tmp_path / "config.json")


@pytest.mark.process
def test_help_imports_nothing_heavy():
    code = "import sys; from trainer.main import main; sys.argv = ['trainer', '--help', 'run']; main()"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--run.max-steps" in done.stdout
    assert "--trainer" not in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pydantic" in imported and not imported & {"torch", "transformers", "verifiers", "vllm"}


@pytest.mark.parametrize("words", ["@ {}", "@{}"])
def test_a_configuration_file_stands_behind_an_at(words):
    # Behind a flag, as other programs take it, the message shows how to write it.
    file = str(Path("configs/a1.toml").resolve())
    assert resolve([*words.format(file).split(), "--run.name", "x"]).run.name == "x"
    with pytest.raises(ConfigError) as refused:
        resolve(["--config", file])
    assert f"@ {file}" in str(refused.value)


def test_a_module_beside_the_configuration_file_can_be_imported(tmp_path, monkeypatch):
    # Its folder is in the configuration, so that every role and a resume find it, behind all that is installed. A
    # folder without modules is left out.
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir()
        (folder / "base.toml").write_text(BASE)
    (mine / "module_beside.py").write_text("")
    config = resolve(["@", str(mine / "base.toml"), "@", str(other / "base.toml")])
    assert config.run.import_from == [mine] and sys.path[-1] == str(mine)
    assert module_file("module_beside") == mine / "module_beside.py"
    sys.path.remove(str(mine))
    (tmp_path / "config.json").write_text(dump(config))
    written = read_config(tmp_path / "config.json")
    assert written == config and str(mine) not in sys.path  # A role that runs the run's code asks for it.
    make_importable(written)
    assert sys.path[-1] == str(mine)
    again = resolve(["@", str(tmp_path / "config.json")])
    assert again.run.import_from == [mine]


def test_modules_are_looked_for_beside_the_last_file_first(tmp_path, monkeypatch):
    # The order is that of the files, and what run.import_from names stays before them.
    monkeypatch.setattr(sys, "path", [*sys.path])
    folders = [tmp_path / str(number) for number in range(6)]
    for folder in folders:
        folder.mkdir()
        (folder / "base.toml").write_text(BASE)
        (folder / "same_name.py").write_text("")
    words = [word for folder in folders for word in ("@", str(folder / "base.toml"))]
    assert resolve(words).run.import_from == folders[::-1]
    named = resolve([*words, "--run.import_from", json.dumps([str(folders[2])])])
    assert named.run.import_from == [folders[2], *(folder for folder in folders[::-1] if folder != folders[2])]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--run.output_dir", "--run.max_steps", "3"], "--run.output_dir"),
        (["--no-run.name"], "--no-run.name"),
        (["--trainer.optim", '{"lr": 1e-3}'], "--trainer.optim"),
        (["--orchestrator.source.0.taskset.id.name", "x"], "--orchestrator.source.0.taskset.id.name"),
        (["--run.import_from", "/tmp", "overlay.toml"], "overlay.toml"),
    ],
)
def test_flags_that_lose_a_value_are_refused(base, words, key):
    # A value that is missing, a section in place of its keys, a file without its @.
    with pytest.raises(ConfigError) as refused:
        resolve(["@", base, *words])
    assert key in str(refused.value)
