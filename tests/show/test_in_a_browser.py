"""The page in a real browser, headless.

What is drawn at each step is what was recorded, and nothing is loaded.

Needs Chromium with its driver and the test extra's selenium; without one of them every test here is skipped, and says
what is missing.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from pagedkv.lab.recording import Frame, Move
from pagedkv.lab.show import page, picture

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

pytestmark = pytest.mark.slow


def driver_of_a_browser(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A driver of a headless browser with a profile of its own, or a skip with its reason."""
    if importlib.util.find_spec("selenium") is None:
        pytest.skip("selenium is not installed: pip install '.[test]'")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "no Chromium" if browser is None else "no chromedriver"
        pytest.skip(f"{missing} here: apt-get install chromium chromium-driver (Debian)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    profile = tmp_path_factory.mktemp("browser")
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1000",
        "--disable-background-networking", "--disable-component-update", "--no-first-run", f"--user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser for all tests of this file."""
    driver = driver_of_a_browser(tmp_path_factory)
    yield driver
    driver.quit()


class Page:
    """An open page, and what stands in it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def click(self, element_id: str) -> None:
        self.driver.find_element("id", element_id).click()

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def text(self, element_id: str) -> str:
        return self.run("return document.getElementById(arguments[0]).textContent", element_id)

    @property
    def step(self) -> int:
        return int(self.run("return document.documentElement.dataset.step"))

    def blocks(self, tier: str) -> list[dict[str, Any]]:
        """The blocks that are drawn of a tier."""
        return self.run(
            """return [...document.querySelectorAll(`.block[data-tier="${arguments[0]}"]`)].map((cell) => ({
                 id: Number(cell.dataset.block), kinds: [...cell.classList], references: cell.dataset.references,
                 owners: cell.dataset.owners, filled: cell.dataset.filled, text: cell.textContent,
                 box: (({x, y, width, height}) => [x, y, width, height])(cell.getBoundingClientRect()),
                 slots: cell.querySelectorAll(".slot.filled").length}))""",
            tier,
        )

    def tables(self) -> dict[str, list[int]]:
        """The block tables that are drawn, by sequence."""
        found: dict[str, list[int]] = self.run(
            """return Object.fromEntries([...document.querySelectorAll(".sequence")].map((row) =>
                 [row.dataset.sequence,
                  [...row.querySelectorAll(".logical")].map((cell) => Number(cell.dataset.block))]))"""
        )
        return found

    def sticking_out(self) -> list[str]:
        """Texts that do not lie within their own block."""
        found: list[str] = self.run(
            """return [...document.querySelectorAll(".block")].flatMap((cell) => {
                 const box = cell.querySelector("rect").getBoundingClientRect();
                 return [...cell.querySelectorAll("text")].filter((text) => text.textContent).filter((text) => {
                   const at = text.getBoundingClientRect();
                   return at.left < box.left - 1 || at.right > box.right + 1
                       || at.top < box.top - 1 || at.bottom > box.bottom + 1;
                 }).map((text) => text.textContent); })"""
        )
        return found

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))


def requests_of(browser: Any, address: str) -> set[str]:
    """Return what a page has asked for since the last call, itself included.

    Data that stands in the page is no request.
    """
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    urls = {params["request"]["url"] for params in sent if params["documentURL"] == address}
    return {url for url in urls if not url.startswith("data:")}


@pytest.fixture
def shown(browser, demo, tmp_path) -> Iterator[Page]:
    """The built-in run, at its first step.

    At the end: no complaint on the console, and no request but for the file.
    """
    path = tmp_path / "run.html"
    path.write_text(page(demo), encoding="utf-8")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())
    yield Page(browser)
    assert browser.get_log("browser") == []
    assert requests_of(browser, path.as_uri()) == {path.as_uri()}


def check(shown: Page, demo: Any, step: int) -> None:
    """What is drawn is the frame."""
    frame = demo.frames[step - 1]
    assert shown.step == step
    assert shown.text("caption") == frame.caption
    assert shown.text("counter") == f"step {step} of {len(demo.frames)}"
    assert shown.text("text") == picture(demo, step)
    assert shown.tables() == {sequence.name: list(sequence.blocks) for sequence in frame.sequences}
    copied = {target for _, target in frame.copies}
    for tier, size in demo.tiers.items():
        drawn = shown.blocks(tier)
        assert [block["id"] for block in drawn] == list(range(size))
        held = frame.held(tier)
        for block in drawn:
            assert block["box"][2] > 50, "drawn, and not merely in the document"
            kinds = set(block["kinds"]) - {"cell", "block"}
            if block["id"] not in held:
                assert kinds == {"free"}
                assert "free" in block["text"]
                continue
            there = held[block["id"]]
            wanted = {"held"} | ({"shared"} if there.shared else set()) | ({"moving"} if there.moving else set())
            assert kinds == wanted | ({"copied"} if tier == "device" and there.block in copied else set())
            assert block["references"] == str(there.references)
            assert block["owners"].split() == [*(["tree"] if there.in_tree else []), *there.sequences]
            assert block["filled"] == str(len(there.tokens)) == str(block["slots"])
            assert {"in": "arriving", "out": "leaving", "": ""}[there.moving] in block["text"]
            assert " ".join(demo.text(token) for token in there.tokens) in block["text"]
    assert shown.count(".wire") == sum(len(sequence.blocks) for sequence in frame.sequences)
    assert shown.count(".arrow.copy") == len(frame.copies)
    flying = any(block.moving == "in" for held in frame.tiers.values() for block in held)
    assert shown.count(".arrow.move") == (len(frame.moves) if flying else 0)


def test_every_step_is_drawn_as_it_was_recorded(shown, demo):
    for step in range(1, len(demo.frames) + 1):
        check(shown, demo, step)
        if step < len(demo.frames):
            shown.click("next")


def test_the_step_with_the_copy_on_write_marks_what_is_shared_and_what_is_copied(shown, demo):
    step = next(i for i, frame in enumerate(demo.frames, 1) if frame.copies)
    shown.run("document.querySelectorAll('#steps button')[arguments[0]].click()", step - 1)
    blocks = {block["id"]: block for block in shown.blocks("device")}
    assert [i for i, block in blocks.items() if "shared" in block["kinds"]] == [0, 1, 4]
    assert [i for i, block in blocks.items() if "copied" in block["kinds"]] == [6, 7]
    assert blocks[0]["owners"] == "tree A B C"
    assert "refs 4" in blocks[0]["text"]
    assert "Copied on write from block 5" in blocks[6]["text"]
    assert shown.count(".logical.shared") == 8


def test_buttons_go_both_ways_and_stop_at_the_ends(shown, demo):
    count = len(demo.frames)
    disabled = "return [...document.querySelectorAll('#controls button:disabled')].map((button) => button.id)"
    assert shown.run(disabled) == ["first", "back"]
    for button, step in (("next", 2), ("next", 3), ("back", 2), ("last", count), ("back", count - 1), ("first", 1)):
        shown.click(button)
        check(shown, demo, step)
    shown.click("last")
    assert shown.run(disabled) == ["next", "last"]


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_nothing_is_cut_off_whatever_the_windows_width(shown, demo, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    shown.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for _ in demo.frames:
            assert shown.run("return window.innerWidth") == width
            assert shown.run("return document.documentElement.scrollWidth") <= width, f"step {shown.step} is wider"
            assert shown.sticking_out() == [], f"step {shown.step}"
            if shown.step < len(demo.frames):
                shown.click("next")
        shown.run("document.styleSheets[0].insertRule('.block text { font-size: 40px !important }')")
        assert shown.sticking_out(), "a text that is too large was not noticed"
    finally:
        shown.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_keys_step_and_play(shown, demo):
    right, left, home, end, space = "\ue014", "\ue012", "\ue011", "\ue010", " "
    for key, step in ((right, 2), (right, 3), (left, 2), (end, len(demo.frames)), (right, len(demo.frames)), (home, 1)):
        shown.press(key)
        assert shown.step == step
    shown.press(space)
    assert shown.run("return document.getElementById('play').getAttribute('aria-pressed')") == "true"
    shown.press(space)
    assert shown.run("return document.getElementById('play').getAttribute('aria-pressed')") == "false"


def test_playing_goes_on_by_itself_until_it_is_paused(shown):
    from selenium.webdriver.support.ui import WebDriverWait

    shown.click("play")
    WebDriverWait(shown.driver, 30, poll_frequency=0.1).until(lambda _: shown.step >= 3)
    shown.click("play")
    assert shown.text("play") == "Play"
    stopped = shown.step
    later = "return new Promise((done) => setTimeout(() => done(document.documentElement.dataset.step), 2000))"
    assert shown.run(later) == str(stopped)


def test_the_slider_goes_to_its_step(shown, demo):
    shown.run(
        "const slider = document.getElementById('slider'); slider.value = arguments[0];"
        "slider.dispatchEvent(new Event('input'))",
        "20",
    )
    check(shown, demo, 20)


def test_a_reader_of_the_page_hears_the_steps_and_can_reach_every_control(shown):
    tree = shown.run(
        """return {live: document.getElementById("caption").getAttribute("aria-live"),
                   role: document.getElementById("picture").getAttribute("role"),
                   said: document.getElementById("slider").getAttribute("aria-valuetext"),
                   unnamed: [...document.querySelectorAll("button, input")].filter(
                     (element) => !element.textContent.trim() && !element.getAttribute("aria-label")).length,
                   language: document.documentElement.lang}"""
    )
    assert tree["live"] == "polite"
    assert tree["role"] == "img"
    assert tree["said"].startswith("step 1: The recording begins.")
    assert tree["unnamed"] == 0
    assert tree["language"] == "en"


def colours(shown: Page) -> tuple[str, str]:
    """Of the paper and of the ink."""
    found: list[str] = shown.run(
        "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
    )
    return found[0], found[1]


def test_light_and_dark_follow_the_system_or_the_button(shown):
    light, dark = ("rgb(255, 255, 255)", "rgb(29, 35, 48)"), ("rgb(20, 23, 29)", "rgb(230, 233, 240)")
    for system, wanted in (("light", light), ("dark", dark)):
        features = {"features": [{"name": "prefers-color-scheme", "value": system}]}
        shown.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
        assert colours(shown) == wanted
        shown.click("theme")
        assert (shown.text("theme"), colours(shown)) == ("Theme: light", light)
        shown.click("theme")
        assert (shown.text("theme"), colours(shown)) == ("Theme: dark", dark)
        shown.click("theme")
        assert (shown.text("theme"), colours(shown)) == ("Theme: auto", wanted)
    shown.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def arrives(frame: Frame, move: Move) -> bool:
    """Whether a move's destination is drawn as such."""
    held: Any = frame.held_pages(move.group, move.destination) if move.group else frame.held(move.destination)
    return move.to in held and held[move.to].moving == "in"


def test_over_groups_every_step_has_a_lane_for_each_group(browser, demo_of_groups, tmp_path):
    path = tmp_path / "groups.html"
    path.write_text(page(demo_of_groups), encoding="utf-8")
    browser.get_log("browser")
    browser.get(path.as_uri())
    shown = Page(browser)
    assert shown.count("#legend li[hidden]") == 0
    labels = [group.label(number) for number, group in enumerate(demo_of_groups.groups)]
    for step, frame in enumerate(demo_of_groups.frames, 1):
        assert shown.step == step
        paged = shown.run(
            """return [...document.querySelectorAll(".paged")].map((cell) => [
                 cell.closest(".sequence").dataset.sequence,
                 ...["group", "logical", "page"].map((name) => Number(cell.dataset[name]))])"""
        )
        assert paged == [
            [seq.name, group, logical, page]
            for seq in frame.sequences
            for group, table in enumerate(seq.tables, start=1)
            for logical, page in enumerate(table.pages, start=table.first)
        ]
        above = shown.run(  # each page stands under the logical block that it is of
            """return [...document.querySelectorAll(".paged")].every((cell) => {
                 const above = `.logical[data-logical="${cell.dataset.logical}"]`;
                 const logical = cell.closest(".sequence").querySelector(above);
                 const [a, b] = [logical, cell].map((each) => each.getBoundingClientRect());
                 return Math.abs(a.x - b.x) < 2 && b.y >= a.y + a.height - 2; })"""
        )
        assert above
        drawn = shown.run(
            """return [...document.querySelectorAll(".page.held")].map((cell) => [cell.dataset.tier,
                 ...["group", "page", "references", "logical", "filled"].map((name) => Number(cell.dataset[name])),
                 Number(cell.dataset.points ?? 0), cell.dataset.owners, cell.classList.contains("moving")])"""
        )
        assert drawn == [
            [
                tier, held.group, held.page, held.references, held.logical, len(held.tokens), held.points,
                " ".join([*(["tree"] if held.in_tree else []), *held.sequences]), bool(held.moving),
            ]
            for tier, pages in frame.pages.items() for held in pages
        ]  # fmt: skip
        told = shown.run("return [...document.querySelectorAll('.lane > text')].map((text) => text.textContent)")
        assert all(text.startswith(labels[i % len(labels)]) for i, text in enumerate(told))
        owners = shown.run(
            "return [...document.querySelectorAll('svg .extent')].map((cell) => Number(cell.dataset.owner))"
        )
        assert owners == [owner for some in frame.extents.values() for owner in some]
        assert [block["id"] for block in shown.blocks("device") if "held" in block["kinds"]] == sorted(frame.held())
        standing = sum(point.tier == "device" for point in frame.points)
        assert shown.run(
            """return [...document.querySelectorAll('.block[data-tier="device"]')].reduce(
                 (sum, cell) => sum + Number(cell.dataset.points ?? 0), 0)"""
        ) == standing  # fmt: skip
        assert shown.count(".arrow.move") == sum(arrives(frame, move) for move in frame.moves)
        sizes, owners = demo_of_groups.per_extent["device"], frame.extents["device"]
        copies = [
            *((0, source) for source, _ in frame.copies),
            *((group, source) for group, source, _ in frame.page_copies),
        ]
        there = [group == owners[source // sizes[group]] for group, source in copies]  # else it was freed
        assert shown.count(".arrow.copy") == len(copies)
        assert shown.count("text.source") == len(copies) - sum(there)
        if step < len(demo_of_groups.frames):
            shown.click("next")
    assert browser.get_log("browser") == []


def test_texts_that_look_like_markup_are_shown_as_they_are(browser, demo, tmp_path):
    hostile = "</script><img src=x onerror=alert(1)>"
    frame = dataclasses.replace(demo.frames[3], caption=hostile)
    path = tmp_path / "hostile.html"
    path.write_text(page(dataclasses.replace(demo, frames=(frame,), texts=dict.fromkeys(demo.texts, hostile))))
    browser.get_log("browser")
    browser.get(path.as_uri())
    shown = Page(browser)
    assert shown.text("caption") == hostile
    assert shown.count("img") == 0
    assert hostile in shown.blocks("device")[0]["text"]
    assert browser.get_log("browser") == []


def test_a_page_that_would_load_something_is_seen_to_and_is_stopped_by_its_policy(browser, demo, tmp_path):
    (tmp_path / "other.png").write_bytes(b"")
    path = tmp_path / "asking.html"
    path.write_text(page(demo).replace("<noscript>", '<img src="other.png" alt=""><noscript>'))
    browser.get_log("performance")
    browser.get(path.as_uri())
    assert {url.rpartition("/")[2] for url in requests_of(browser, path.as_uri())} == {"asking.html", "other.png"}
    (complaint,) = browser.get_log("browser")
    assert "img-src data:" in complaint["message"]
    assert "blocked" in complaint["message"]


def test_a_large_pool_draws_what_is_owned(browser, demo, tmp_path):
    path = tmp_path / "large.html"
    path.write_text(page(dataclasses.replace(demo, tiers={**demo.tiers, "device": 100_000}), step=15))
    browser.get(path.as_uri())
    shown = Page(browser)
    assert shown.step == 15, "the page opens where it was told to"
    assert [block["id"] for block in shown.blocks("device")] == [0, 1, 2, 3, 4, 6, 7]
    assert browser.get_log("browser") == []
