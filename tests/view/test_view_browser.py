"""The page and the report in a real browser: headless Chromium, driven through chromedriver.

Skipped where Chromium, chromedriver or selenium is missing (Debian: apt-get install chromium chromium-driver).
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from composer_prime.console import console_script
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.run_dir import RunDir
from composer_prime.view.report_html import write_report
from tests.view.run_made import HOSTILE, batch, log_step, make_run, rollout, write_lines
from tests.view.test_view_server import serving

pytestmark = pytest.mark.process

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def browser() -> Iterator:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium with chromedriver is installed (Debian: chromium and chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is in the dependency group dev")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1300,900",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    chrome.set_page_load_timeout(DEADLINE_S)
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Two runs that may be looked at and not changed."""
    folder = tmp_path_factory.mktemp("view") / "outputs"
    make_run(folder / "a1")
    make_run(folder / "a2", seed=1, learns=False, channels={"sdpo": {"weight": 0.0}})
    return folder


@pytest.fixture
def server(outputs):
    with serving(outputs) as server:
        yield server


class Page:
    """What a test does with the browser. Every wait has a deadline and says what it waits for."""

    def __init__(self, browser, address: str) -> None:
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        again = [StaleElementReferenceException]
        self.browser = browser
        self._wait = WebDriverWait(browser, DEADLINE_S, poll_frequency=0.05, ignored_exceptions=again)
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(address)

    def text(self, selector: str = "main") -> str:
        return self.browser.execute_script(f"return document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def until(self, words: str, selector: str = "main") -> None:
        from selenium.common.exceptions import TimeoutException

        try:
            self.until_true(lambda: words in self.text(selector), f"{words!r} in {selector}")
        except TimeoutException as error:
            error.msg = f"{error.msg}; it has {self.text(selector)[:600]}"
            raise

    def until_true(self, check: Callable[[], object], what: str) -> None:
        self._wait.until(lambda _: check(), f"waited for {what}")

    def all(self, selector: str) -> list:
        return self.browser.find_elements("css selector", selector)

    def click(self, selector: str) -> None:
        """The page may draw an element anew before the click arrives: then it is looked for again."""
        scroll = f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})"

        def click() -> bool:
            elements = self.all(selector)
            if elements:
                self.browser.execute_script(scroll)
                elements[0].click()
            return bool(elements)

        self.until_true(click, selector)

    def choose(self, selector: str, value: str) -> None:
        from selenium.webdriver.support.select import Select

        def choose() -> bool:
            elements = self.all(selector)
            for element in elements[:1]:
                Select(element).select_by_value(value)
            return bool(elements)

        self.until_true(choose, selector)

    def click_text(self, selector: str, words: str) -> None:
        next(element for element in self.all(selector) if words in element.text).click()

    def keys(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    @property
    def hash(self) -> str:
        return self.browser.execute_script("return decodeURIComponent(location.hash)")

    def check_clean(self) -> None:
        """Assert that no script of a run ran, nothing left the machine, and the console has no error."""
        assert self.browser.execute_script("return window.hacked") is None
        loaded = self.browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
        assert all(name.startswith(("http://127.0.0.1:", "data:")) for name in loaded)
        assert self.browser.get_log("browser") == []


# From the list through a run, its rollouts, one of them, its siblings and back, by mouse: each page shows its data, and
# markup inside a rollout stays text.
def test_a_walk_by_mouse(browser, server):
    page = Page(browser, server.address)
    page.until("2 runs")
    assert len(page.all("#runs tbody tr")) == 2 and "policy.objective unset" in page.text("#runs")
    # Lines of the list have one scale: both begin at half of the highest reward.
    assert [line.get_attribute("d")[:9] for line in page.all(".spark path")] == ["M2.0 12.0"] * 2
    page.click("a[href='#/run/a1']")
    page.until("it learned (0.250 after step 0, 0.875 after step 12)")
    assert len(page.all(".chart svg")) >= 5 and page.all(".chart .bar") and page.all(".line.bold")
    assert HOSTILE in page.text("#events")
    assert len(page.all("#nodes tbody tr")) == 2 and "$6.25" in page.text("#nodes")
    assert page.all("select[aria-label='figure']")[0].get_attribute("value") == "loss/total"
    page.click_text("nav.tabs a", "Rollouts")
    page.until("1–96 of 96 rollouts")
    page.click("#rollouts tbody tr:nth-child(2)")
    page.until("Use a.")
    assert HOSTILE in page.text(".rollout") and 'add({"a": 1})' in page.text(".rollout")
    assert "add(a: integer)" in page.text(".rollout details") and "failed call" in page.text(".turn.failed")
    page.click("#side")
    page.until_true(lambda: len(page.all(".rollout")) == 4, "four siblings")
    page.click_text("nav.tabs a", "Evaluations")
    page.until("5 fixed")
    page.click("#fixed tbody tr")
    page.until("after step 12")
    page.until_true(lambda: len(page.all(".rollout")) == 2, "the task before and after")
    page.click_text("nav.tabs a", "Costs")
    page.until("$0.25 in 1 call", "#costs")
    page.click_text("nav.tabs a", "Settings")
    page.until("orchestrator.eval.pass_threshold", "#settings")
    page.check_clean()


# The filters are the address: a link opens the same list, and Back undoes a filter.
def test_filters_are_links(browser, server):
    page = Page(browser, f"{server.address}#/run/a1/rollouts?step=2&min=0.5")
    page.until("1–4 of 4 rollouts")
    page.choose("#filter-error", "tool")
    page.until("1–2 of 2 rollouts")
    assert page.hash == "#/run/a1/rollouts?step=2&min=0.5&error=tool"
    browser.refresh()
    page.until("1–2 of 2 rollouts")
    browser.back()
    page.until("1–4 of 4 rollouts")
    page.click_text(".filters button", "Failed")
    page.until("the box broke")
    page.check_clean()


# An address that leads nowhere says so, and shows no other page in its place.
def test_an_unknown_page_is_named(browser, server):
    page = Page(browser, f"{server.address}#/run/a1/flips")
    page.until("a run has no page flips", "[role='alert']")
    page.check_clean()


# Keys: j and k move, Enter opens, j goes to the next sibling, s shows them all, u goes up, / finds, ? lists the keys.
def test_keys(browser, server):
    page = Page(browser, f"{server.address}#/run/a1/rollouts?step=1")
    page.until("1–8 of 8 rollouts")
    page.keys("j")
    page.keys("j")
    page.keys("k")
    page.keys("j")
    assert "g000002-1" in page.text("tr.current")
    page.keys("\ue007")
    page.until_true(lambda: page.hash == "#/run/a1/rollout/step/1/g000002-1", "the rollout's address")
    page.until("reward 1")
    page.keys("j")
    page.until_true(lambda: page.hash.endswith("g000002-2"), "the next sibling")
    page.until("g000002-2", ".rollout")
    page.keys("s")
    page.until_true(lambda: len(page.all(".rollout")) == 4, "four siblings")
    page.keys("u")
    page.until_true(lambda: page.hash == "#/run/a1/rollouts?step=1", "the list")
    page.until("1–8 of 8 rollouts")
    page.keys("/")
    page.keys("g000003", "\ue007")
    page.until("1–4 of 4 rollouts")
    page.keys("\ue00c")
    page.keys("?")
    page.until("next and previous row", "dialog")
    page.click("dialog button")
    page.until_true(lambda: not page.all("dialog[open]"), "the end of the list of keys")
    page.keys("t")
    themes = {page.browser.execute_script("return document.documentElement.dataset.theme")}
    page.keys("t")
    themes.add(page.browser.execute_script("return document.documentElement.dataset.theme"))
    assert themes == {"light", "dark"}
    page.check_clean()


# Two chosen runs are laid over each other, with the settings in which they differ.
def test_runs_are_laid_over_each_other(browser, server):
    page = Page(browser, server.address)
    page.until("2 runs")
    for name in ("a1", "a2"):
        page.click(f"input[aria-label='lay {name} over others']")
    # The page may draw the button anew between press and release.
    page.until_true(lambda: page.hash.startswith("#/compare/") or page.click("#compare"), "the comparison")
    page.until("Configuration difference")
    assert "run.seed" in page.text()
    keys = {element.text for element in page.all(".chart:first-of-type .legend .key")}
    assert {"a1", "a2"} <= keys
    assert "Clipped and masked: masked fraction" in page.text()
    page.choose("#chart-axis", "tokens")
    ticks = "return [...document.querySelectorAll('.tick')].map(each => each.textContent)"
    page.until_true(lambda: "10,000 tokens" in browser.execute_script(ticks), "an axis of tokens")
    page.choose("#chart-mean", "0")
    page.until_true(lambda: not page.all(".line.bold"), "charts without a mean")
    assert page.all("#csv")[0].get_attribute("href").startswith("data:text/csv")
    page.check_clean()


# A phone shows state, reward and held-out score of each run without scrolling sideways.
def test_the_list_fits_a_phone(browser, server):
    size = {"width": 390, "height": 840, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page = Page(browser, server.address)
        page.until("Held-out")
        hidden = "const box = document.querySelector('.scroll'); return box.scrollWidth - box.clientWidth"
        assert browser.execute_script(hidden) <= 0
        assert not re.search(r"(^|[^\d])\.\d", page.text())  # Every number has its digit before the point.
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# Sampled tokens are colored inside the conversation, in place of the text and the calls that were read from them.
def test_sampled_tokens_are_colored(browser, outputs, server):
    line = rollout(20, 90, 0, 1.0)
    line["turns"][1]["tokens"] = [[36, -0.25], [71, -4.0]]
    write_lines(RunDir(outputs / "a1").rollouts(20), [line])
    try:
        page = Page(browser, f"{server.address}#/run/a1/rollout/step/20/g000090-0")
        page.until("Be", ".turn.assistant")
        assert [mark.get_attribute("title") for mark in page.all(".token")] == ["log p −0.250", "log p −4"]
        assert "add(" not in page.text(".turn.assistant")
        page.click("#color")
        page.until("add(", ".turn.assistant")
    finally:
        RunDir(outputs / "a1").rollouts(20).unlink()


# `composer view` prints an address; the page follows a run without a reload, and says when its server has ended.
def test_the_page_is_live(browser, tmp_path):
    run_dir = make_run(tmp_path / "outputs" / "a1", steps=3)
    words = [*console_script("composer"), "view", str(tmp_path / "outputs"), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(word for word in process.stdout.readline().split() if word.startswith("http://127.0.0.1:"))
            page = Page(browser, address)
            page.until("3 of 3")
            assert page.hash == "#/run/a1"
            log_step(MetricsFile(run_dir.metrics, "trainer"), 4)
            write_lines(RunDir(run_dir.root).rollouts(4), batch(4))
            page.until("4 of 3")
            page.check_clean()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(DEADLINE_S)
    assert process.returncode == 0
    page.until("server has ended", "#lost")


# report.html opens from a file, shows the same blocks, and runs no script of a rollout.
def test_the_report_opens_from_a_file(browser, outputs, tmp_path):
    report = write_report(RunDir(outputs / "a1"), tmp_path / "report.html")
    page = Page(browser, report.as_uri())
    page.until("it learned")
    assert page.all(".verdict")[0].location["y"] < 120
    assert len(page.all(".chart svg")) >= 5 and len(page.all(".rollout")) == 3 and HOSTILE in page.text()
    page.click_text("summary", "settings")
    page.until("orchestrator.eval.pass_threshold")
    page.check_clean()
