"""report.html: a run in one file."""

import base64
import hashlib
import json
import re

import pytest

from composer_prime.cli import report_command
from composer_prime.errors import ConfigError
from composer_prime.view.report_html import joined_script, report_page
from composer_prime.view.server import ASSETS
from tests.view.run_made import HOSTILE, make_run, rollout, write_lines


def data_of(page: str) -> dict:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


# The report is one file: it loads nothing, and text of a rollout cannot end its data block.
def test_a_report_is_one_file(tmp_path):
    run_dir = make_run(tmp_path / "a1")
    page = report_page(run_dir)
    assert not re.findall(r'(?:src|href)="(?!data:,")', page)
    assert set(re.findall(r"https?://[\w.]+", page)) == {"http://www.w3.org"}
    assert page.count("</script>") == 2 and HOSTILE not in page
    data = data_of(page)
    assert data["run"]["verdict"]["text"].startswith("held-out +0.625 [")
    assert data["run"]["verdict"]["text"].endswith("it learned (0.250 after step 0, 0.875 after step 12)")
    assert [each["why"] for each in data["chosen"]] == ["best", "typical", "worst"]
    assert [data["chosen"][at]["rollout"]["reward"] for at in (0, 2)] == [1.0, 0.0]
    assert data["chosen"][0]["rollout"]["turns"][0]["text"] == HOSTILE
    assert data["evaluation"]["fixed_count"] == 5 and data["run"]["costs"]["hint_usd"] == 0.25
    assert str(tmp_path) not in page


# The policy in the file allows its own script and style, by their hashes, and nothing else.
def test_a_reports_policy_names_its_script(tmp_path):
    page = report_page(make_run(tmp_path / "a1", steps=2))
    script = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page and "unsafe-inline" not in page
    assert "import " not in script[1] and not re.search(r"^export ", script[1], re.MULTILINE)


# Modules are joined into one script, so no two may give their top-level names twice.
def test_modules_can_be_joined():
    names = re.findall(r"^(?:async )?(?:const|let|function) (\w+)", joined_script("report.js"), re.MULTILINE)
    for group in re.findall(r"^const \[([^\]]*)\] =", joined_script("report.js"), re.M):
        names += group.split(", ")
    assert len(names) == len(set(names)) > 40
    for path in ASSETS.glob("*.js"):
        for line in path.read_text().splitlines():
            assert not line.startswith("import ") or re.fullmatch(r'import \{[^}]*\} from "\./[a-z]+\.js";', line)


# A run without an evaluation or a step has a report that says so.
def test_a_report_of_nothing(tmp_path):
    run_dir = make_run(tmp_path / "a1", steps=1)
    run_dir.metrics.unlink()
    for path in (run_dir.root / "rollouts").iterdir():
        path.unlink()
    data = data_of(report_page(run_dir, state="failed"))
    assert data["run"]["verdict"]["text"] == "nothing trained or evaluated yet" and data["run"]["state"] == "failed"
    assert data["chosen"] == [] and data["evaluation"]["steps"] == []


# `composer report RUN --html` writes into the run, or where it is told, one run at a time.
def test_the_report_command_writes_a_page(tmp_path, capsys):
    run_dir = make_run(tmp_path / "a1", steps=2)
    assert report_command.main([str(run_dir.root), "--html"]) == 0
    assert (run_dir.root / "report.html").is_file()
    assert report_command.main([str(run_dir.root), "--html", str(tmp_path / "sent.html")]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {tmp_path / 'sent.html'}\n")
    with pytest.raises(ConfigError, match="name another file"):
        report_command.main([str(run_dir.root), "--html", str(tmp_path)])
    with pytest.raises(ConfigError, match="--html shows one run, not 2"):
        report_command.main([str(run_dir.root), str(run_dir.root), "--html", str(tmp_path / "x.html")])


# A failed rollout has no reward, so it is neither the best nor the worst.
def test_failed_rollouts_are_not_chosen(tmp_path):
    run_dir = make_run(tmp_path / "a1", steps=2)
    write_lines(run_dir.eval_rollouts(2), [rollout(2, None, task, None) for task in range(3)])
    chosen = data_of(report_page(run_dir))["chosen"]
    assert {each["entry"]["kind"] for each in chosen} == {"step"}
