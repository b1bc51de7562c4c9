"""The page of the server in a real Chromium, with a drawer that draws colours."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from PIL import Image

from bench.report import chromium
from rocm_sd.errors import Unsupported
from rocm_sd.serve import Limits, ServeConfig, create_app
from rocm_sd.serve.keys import add_key
from rocm_sd.serve.service import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium: set CHROMIUM, or install one (apt install chromium)"
)

PHONE, DESK = 390, 1280
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}


class Colours:
    """A colour for each seed and quality. By words of the prompt a picture waits to be let go, fails, or is the same in
    every quality.
    """

    def __init__(self) -> None:
        self.go = threading.Event()
        self.drawn: list[Any] = []

    def models(self):
        square = ModelFacts("square", 64, 64, 3.0, ("exact", "high", "balanced"))
        wide = ModelFacts("wide", 96, 64, 7.5, ("exact",), ("ink",))
        return {facts.name: facts for facts in (square, wide)}

    def draw(self, model, drawing, on_step, stop):
        self.drawn.append((model, drawing))
        for step in range(1, drawing.steps + 1):
            is_held = "held" in drawing.prompt and not ("last one" in drawing.prompt and drawing.seed == 1)
            while is_held and step == 3 and not stop() and not self.go.wait(0.01):
                pass
            if error := stop():
                raise error
            if "broken" in drawing.prompt:
                raise Unsupported("The paint", "a dry one")
            on_step(step, lambda: Image.new("RGB", (8, 8), (90, 90, 90)))
        shift = 0 if "same" in drawing.prompt else {"exact": 0, "high": 4, "balanced": 8}[drawing.quality]
        return Image.new("RGB", (drawing.width, drawing.height), (200, 40 * drawing.seed % 256, 60 + shift))

    def close(self) -> None:
        pass


@contextmanager
def serving(config: ServeConfig, drawer: Any, *, loaded: threading.Event | None = None) -> Iterator[str]:
    """Its address."""

    def load(_config, _metrics):
        if loaded is not None:
            loaded.wait(20)
        return drawer

    app = create_app(config, load, drain_s=0.0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


class Browser(chromium.Chromium):
    """With a mouse and a keyboard: what is covered cannot be clicked, and what has no focus gets no key."""

    def open(self, url: str, *, width: int = DESK, dark: bool = False, moves: bool = False) -> None:
        self.events.clear()
        motion = "no-preference" if moves else "reduce"
        features = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": motion}
        self.send("Emulation.setEmulatedMedia", features=[{"name": k, "value": v} for k, v in features.items()])
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        self.send("Page.navigate", url=url)
        until = time.monotonic() + self.timeout
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._message(until)

    def until(self, expression: str, timeout: float = 15.0) -> Any:
        ends = time.monotonic() + timeout
        while not (found := self.value(expression)):
            assert time.monotonic() < ends, f"{expression}\n{self.value('document.body.innerText')}"
            time.sleep(0.02)
        return found

    def key(self, name: str, *, control: bool = False) -> None:
        parts = {"key": name, "code": name, "windowsVirtualKeyCode": KEYS[name], "modifiers": 2 * control}
        text = {"text": "\r"} if name == "Enter" and not control else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **parts, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **parts)

    def click(self, expression: str) -> None:
        """In its middle, as soon as it stands still."""
        find = f"""(() => {{ const e = {expression}; if (!e) return null;
            e.scrollIntoView({{block: 'center', behavior: 'instant'}}); const r = e.getBoundingClientRect();
            const x = r.x + r.width / 2, y = r.y + r.height / 2;
            return e.contains(document.elementFromPoint(x, y)) && {{x, y}}; }})()"""
        middle = self.until(find)
        while (again := self.until(find)) != middle:
            middle = again
        self.mouse("mousePressed", **middle)
        self.mouse("mouseReleased", **middle)

    def mouse(self, kind: str, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def fill(self, name: str, text: str) -> None:
        """What is folded is unfolded first."""
        self.value(f"""(() => {{ const e = document.getElementById('{name}');
            if (e.closest('details')) e.closest('details').open = true; e.focus(); e.select(); }})()""")
        self.send("Input.insertText", text=text)

    def draw(self, prompt: str, **fields: Any) -> None:
        for name, text in {"steps": 4, **fields, "prompt": prompt}.items():
            self.fill(name, str(text))
        self.key("Enter", control=True)

    def press(self, name: str) -> None:
        self.click(named(name))

    def text(self, selector: str) -> str:
        return self.value(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")

    def focused(self) -> str:
        return self.value("document.activeElement.id || document.activeElement.textContent.trim()")


def named(name: str) -> str:
    """The first button or link of that name."""
    is_it = f"e.textContent.trim() === {json.dumps(name)} || e.ariaLabel === {json.dumps(name)}"
    return f"[...document.querySelectorAll('button, a')].find(e => ({is_it}) && e.checkVisibility())"


FILLED = "document.querySelectorAll('#qualities input').length"
DONE = "document.querySelectorAll('.card:has(a[download]):has([aria-label=Remove])').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(PROGRAM, tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def colours():
    return Colours()


@pytest.fixture(scope="module")
def address(colours):
    with serving(ServeConfig(hosts=("127.0.0.1",)), colours) as started:
        yield started


@pytest.fixture
def page(browser, address, colours):
    """As on a first visit."""
    colours.go.clear()
    colours.drawn.clear()
    browser.send("Storage.clearDataForOrigin", origin=address, storageTypes="all")
    browser.open(address)
    browser.until(FILLED)
    yield browser
    colours.go.set()
    browser.value("localStorage.clear()")


def test_a_picture_is_drawn_with_every_step_and_its_seed(page, colours):
    page.draw("a held frog", seed=7)
    page.until("document.querySelector('.picture')?.src.startsWith('data:image/webp')")
    page.until("document.querySelector('progress').value === 2")
    assert page.text(".work span") == "Step 2 of 4"
    assert page.value("document.querySelector('progress').max") == 4
    page.until("document.querySelector('#status').textContent.includes('1 drawing')")
    colours.go.set()
    page.until(DONE)
    assert page.value("document.querySelector('.picture').alt") == "a held frog"
    page.until("document.querySelector('.picture').naturalWidth === 64")
    page.until("!document.querySelector('progress')")
    facts = page.value("[...document.querySelectorAll('.facts li')].map(e => e.textContent)")
    assert facts[:4] == ["Seed 7", "64 \N{MULTIPLICATION SIGN} 64", "Exact", "4 steps"]
    assert facts[4].endswith(" s")
    assert page.value(f"{named('Download')}.download") == "a-held-frog-7-exact.png"
    (_, drawing), *others = colours.drawn
    assert not others
    assert (drawing.seed, drawing.steps, drawing.guidance, drawing.quality) == (7, 4, 3.0, "exact")


def test_a_seed_that_is_not_given_is_random_and_can_be_used_again(page, colours):
    page.draw("a frog")
    page.until(DONE)
    page.press("Use seed")
    (_, drawing), *_ = colours.drawn
    assert page.value("document.getElementById('seed').value") == str(drawing.seed)
    assert page.focused() == "seed"


def test_several_pictures_have_a_card_each(page, colours):
    page.draw("three held frogs", n=3, seed=1)
    page.until("document.querySelectorAll('progress').length === 3")
    assert page.value(f"!!{named('Cancel all 3')}")
    colours.go.set()
    page.until(f"{DONE} === 3")
    assert page.value("[...document.querySelectorAll('.facts li:first-child')].map(e => e.textContent)") == [
        "Seed 1", "Seed 2", "Seed 3",
    ]  # fmt: skip
    assert page.value("new Set([...document.querySelectorAll('.picture')].map(e => e.src)).size") == 3
    # A new one comes first.
    page.draw("another", n=1)
    page.until("document.querySelector('.prompt').textContent === 'another'")


def test_more_jobs_than_a_browser_has_connections(page, colours):
    """It opens six at once to a server: the page watches some jobs, asks for the others, and is still able to call."""
    for number in range(7):
        page.draw(f"held {number}", seed=number)
        page.until(f"document.querySelectorAll('.card').length === {number + 1}")
    page.until(
        "[...document.querySelectorAll('.work span')].filter(e => e.textContent === 'Drawing, 50 %').length === 4"
    )
    page.until("document.querySelector('#status').textContent.includes('7 drawing')")
    colours.go.set()
    page.until(f"{DONE} === 7")


def test_a_drawing_is_cancelled_and_removed(page):
    page.draw("a held frog")
    page.press("Cancel")
    page.until("document.querySelector('.note').textContent === 'Cancelled.'")
    assert page.value("!document.querySelector('progress')")
    page.press("Remove")
    assert page.value("document.querySelectorAll('.card').length") == 0
    assert page.value("document.getElementById('empty').checkVisibility()")
    assert page.focused().startswith("pictures")


def test_a_page_that_is_left_draws_on_for_nobody(page, address):
    page.draw("a held frog")
    page.until("document.querySelector('progress')?.value === 2")
    page.open(address)
    page.until("document.querySelector('#status').textContent.includes('0 drawing')")


def test_what_failed_is_said(page):
    page.draw("a broken frog")
    page.until("document.querySelector('.note')?.textContent.includes('The paint does not support a dry one.')")
    assert "The paint does not support a dry one." in page.text("#said")
    assert page.value("document.getElementById('said').ariaLive") == "polite"
    # The next one is as good as ever, and nothing is said of the last.
    page.draw("a frog")
    page.until(DONE)
    assert page.text("#said") == ""


def test_what_the_server_refuses_is_said_and_nothing_is_lost(page):
    page.draw("x" * 4001)
    page.until("document.getElementById('said').textContent.includes('takes 4000')")
    assert page.value("document.getElementById('prompt').value.length") == 4001
    assert page.value("document.querySelectorAll('.card').length") == 0


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("prompt", " ", "Say in the prompt what to draw."),
        ("width", "100", "Width takes a multiple of 8, such as 104."),
        ("width", "65536", "That is larger than this server draws: it takes 2048"),
        ("steps", "151", "Steps takes a whole number from 1 to 150."),
        ("seed", "1.5", "Seed takes a whole number"),
        ("n", "9", "Pictures takes a whole number from 1 to 8."),
        ("guidance", "101", "Guidance takes a number from 0 to 100."),
    ],
)
def test_what_cannot_be_drawn_is_said_at_once(page, colours, field, text, said):
    page.fill("prompt", "a frog")
    page.fill("height", "72")
    page.fill(field, text)
    page.value("document.getElementById('more').open = false; document.getElementById('draw').focus()")
    page.key("Enter")
    page.until(f"document.getElementById('said').textContent.startsWith({json.dumps(said)})")
    assert page.focused() == field
    assert page.value(f"document.getElementById('{field}').ariaInvalid") == "true"
    assert page.value(f"document.getElementById('{field}').checkVisibility()"), "what is folded is unfolded"
    assert colours.drawn == []


def test_a_full_queue_is_said(browser):
    drawer = Colours()
    with serving(ServeConfig(hosts=("127.0.0.1",), limits=Limits(queue=1, in_flight=1)), drawer) as address:
        browser.open(address)
        browser.until(FILLED)
        browser.draw("held 1")
        browser.until("document.querySelector('progress')?.value === 2")
        browser.draw("held 2")
        browser.until("document.querySelectorAll('.card').length === 2")
        assert browser.text(".work span") == "Waits for its turn"
        browser.draw("held 3")
        browser.until("/^The queue is full. Try again in [0-9]+ s.$/.test(document.getElementById('said').textContent)")
        assert browser.value("document.getElementById('prompt').value") == "held 3"
        drawer.go.set()
        browser.until(f"{DONE} === 2")
        browser.key("Enter", control=True)
        browser.until(f"{DONE} === 3")
        browser.open("about:blank")


def test_the_page_waits_for_the_models(browser):
    loaded = threading.Event()
    with serving(ServeConfig(hosts=("127.0.0.1",)), Colours(), loaded=loaded) as address:
        browser.open(address)
        browser.until("document.getElementById('said').textContent === 'The models are being loaded.'")
        browser.draw("an early frog")
        assert browser.value("document.querySelectorAll('.card').length") == 0
        loaded.set()
        browser.until(DONE)
        assert browser.text(".prompt") == "an early frog"
        browser.open("about:blank")


def test_the_key_is_asked_for(browser, tmp_path):
    file = tmp_path / "keys.txt"
    key = add_key(file, "alice")
    is_open = "document.getElementById('key-dialog').open"
    with serving(ServeConfig(hosts=("127.0.0.1",), keys=file), Colours()) as address:
        browser.open(address)
        browser.until(is_open)
        assert browser.focused() == "key"
        browser.key("Escape")
        browser.until("document.getElementById('said').textContent.startsWith('An API key is needed')")
        browser.draw("a frog")
        browser.until(is_open)
        browser.send("Input.insertText", text="not it")
        browser.key("Enter")
        browser.until("document.getElementById('key-said').textContent === 'The server does not know that key.'")
        browser.send("Input.insertText", text=key)
        browser.key("Enter")
        browser.until(DONE)
        assert not browser.value(is_open)
        assert key not in browser.value("JSON.stringify(localStorage)"), "it goes with the tab"
        browser.open(address)
        browser.until(FILLED)
        assert not browser.value(is_open)
        browser.open("about:blank")


def test_only_what_a_model_has_can_be_chosen(page, colours):
    assert page.value("[...document.querySelectorAll('#qualities input')].map(e => e.value)") == [
        "exact", "high", "balanced",
    ]  # fmt: skip
    assert page.value("[...document.getElementById('scheduler').options].map(e => e.value)")[:3] == ["", "ddim", "pndm"]
    for size in page.value("[...document.querySelectorAll('#shapes input')].map(e => e.value)"):
        width, height = map(int, size.split("x"))
        assert width % 8 == height % 8 == 0
        assert 0.5 < width * height / 64**2 < 2
    page.click("document.getElementById('qualities').lastChild")
    page.value("""document.getElementById('model').value = 'wide';
        document.getElementById('model').dispatchEvent(new Event('change', {bubbles: true}))""")
    assert page.value("[...document.querySelectorAll('#qualities input')].map(e => e.value)") == ["exact"]
    assert page.value("['width', 'height', 'guidance'].map(id => document.getElementById(id).value)") == [
        "96",
        "64",
        "7.5",
    ]
    page.value("document.getElementById('more').open = true")
    page.click("document.querySelector('#loras input')")
    page.send("Input.insertText", text="0.5")
    page.draw("a frog")
    page.until(DONE)
    (model, drawing), *_ = colours.drawn
    assert (model, drawing.width, drawing.quality, drawing.loras) == ("wide", 96, "exact", (("ink", 0.5),))
    assert not page.value(f"!!({named('Compare with exact')} || {named('Compare with high')})")


def test_what_was_typed_is_there_on_the_next_visit(page, address):
    page.fill("prompt", "a remembered frog")
    page.fill("width", "72")
    page.click("document.getElementById('qualities').lastChild")
    page.open(address)
    page.until(FILLED)
    values = "['prompt', 'width', 'seed'].map(id => document.getElementById(id).value)"
    assert page.value(values) == ["a remembered frog", "72", ""]
    assert page.value("document.querySelector('[name=quality]:checked').value") == "balanced"


def test_a_picture_to_start_from(page, colours, tmp_path):
    Image.new("RGB", (200, 100), (0, 0, 255)).save(tmp_path / "start.png")
    page.value("document.getElementById('more').open = true")
    document = page.send("DOM.getDocument")["root"]["nodeId"]
    field = page.send("DOM.querySelector", nodeId=document, selector="#file")["nodeId"]
    page.send("DOM.setFileInputFiles", files=[str(tmp_path / "start.png")], nodeId=field)
    page.until("document.getElementById('start').checkVisibility()")
    page.value("document.getElementById('strength').focus()")
    page.key("ArrowLeft")
    page.draw("a frog")
    page.until(DONE)
    (_, drawing), *_ = colours.drawn
    assert (drawing.image.size, drawing.image.getpixel((0, 0)), drawing.strength) == ((88, 48), (0, 0, 255), 0.7)
    assert (drawing.width, drawing.height) == (88, 48), "its shape, and as many pixels as the model is made for"
    page.press("Remove")
    page.draw("a frog")
    page.until(f"{DONE} === 2")
    assert colours.drawn[1][1].image is None


def test_a_file_that_is_no_picture(page, tmp_path):
    (tmp_path / "start.png").write_text("a story")
    document = page.send("DOM.getDocument")["root"]["nodeId"]
    field = page.send("DOM.querySelector", nodeId=document, selector="#file")["nodeId"]
    page.send("DOM.setFileInputFiles", files=[str(tmp_path / "start.png")], nodeId=field)
    page.until("document.getElementById('said').textContent.startsWith('That file cannot be read')")


SPLIT = "document.querySelector('.split')"
SHARE = "document.querySelector('.stage').style.getPropertyValue('--split')"


def test_exact_and_budgeted_are_compared_by_a_slider(page, colours):
    page.click("document.getElementById('qualities').lastChild")
    page.draw("a held frog", seed=3)
    colours.go.set()
    page.until(DONE)
    colours.go.clear()
    page.press("Compare with exact")
    # The other one is seen from its first step on.
    page.until("document.querySelector('.layer:not(.over) img')?.src.startsWith('data:image/webp')")
    page.until("document.querySelector('.work span')?.textContent === 'Exact, step 2 of 4'")
    colours.go.set()
    page.until("document.querySelector('.note').textContent")
    # 8 of 256 in one of three colours.
    assert "The two are 34.8 dB apart (PSNR; more is nearer)." in page.text(".note")
    assert "Exact took" in page.text(".note")
    one, other = (drawing for _, drawing in colours.drawn)
    assert (one.quality, other.quality) == ("balanced", "exact")
    assert (one.seed, one.steps, one.width, one.guidance) == (other.seed, other.steps, other.width, other.guidance)
    assert page.value("[...document.querySelectorAll('.layer img')].map(e => e.alt)") == [
        "Exact: a held frog", "Balanced: a held frog",
    ]  # fmt: skip

    assert page.value(f"document.activeElement === {SPLIT}")
    assert page.value(SHARE) == "50%"
    page.key("ArrowRight")
    assert page.value(SHARE) == "50.5%"
    page.key("End")
    assert page.value(f"{SPLIT}.getAttribute('aria-valuetext')") == "100 % exact, 0 % balanced"
    box = page.value(
        f"(() => {{ const r = {SPLIT}.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; }})()"
    )
    x, y, width, height = box
    page.mouse("mousePressed", x + width * 0.5, y + height * 0.8)
    page.mouse("mouseMoved", x + width * 0.25, y + height * 0.8)
    page.mouse("mouseReleased", x + width * 0.25, y + height * 0.8)
    assert abs(float(page.value(SHARE).removesuffix("%")) - 25) <= 1

    assert page.value(f"{named('Download exact')}.href !== {named('Download balanced')}.href")
    page.press("Enlarge")
    assert page.value(f"document.getElementById('viewer').contains({SPLIT})")
    page.key("Escape")
    page.until(f"document.querySelector('.card').contains({SPLIT})")
    page.press("End the comparison")
    assert page.value(f"!{SPLIT} && document.querySelector('.picture').alt === 'a held frog'")


def test_what_was_drawn_before_is_not_drawn_again_to_be_compared(page, colours):
    page.draw("the same frog", seed=3)
    page.until(DONE)
    page.click("document.getElementById('qualities').children[1]")
    page.key("Enter", control=True)
    page.until(f"{DONE} === 2")
    page.press("Compare with exact")
    page.until("document.querySelector('.note').textContent.includes('The two are the same in every pixel.')")
    assert len(colours.drawn) == 2
    # The picture is gone with its own card, but not from the comparison.
    page.value("document.querySelectorAll('[aria-label=Remove]')[1].click()")
    page.until("document.querySelectorAll('.card').length === 1")
    page.press("End the comparison")
    page.press("Compare with exact")
    page.until("document.querySelector('.note').textContent.includes('The two are the same in every pixel.')")
    assert len(colours.drawn) == 2


def test_a_picture_is_compared_while_others_of_its_request_are_drawn(page, colours):
    page.draw("two frogs, the last one held", seed=1, n=2)
    page.until("document.querySelectorAll('.card a[download]').length === 1")
    page.press("Compare with high")
    page.until("document.querySelectorAll('progress').length === 1 && !!document.querySelector('.note').textContent")
    colours.go.set()
    page.until(f"{DONE} === 2")
    assert page.value(f"!!{SPLIT}")


def test_a_comparison_is_cancelled(page, colours):
    colours.go.set()
    page.draw("a held frog")
    page.until(DONE)
    colours.go.clear()
    page.press("Compare with high")
    page.press("Cancel")
    page.until(f"!{SPLIT} && !!{named('Compare with high')}")
    assert page.value("document.querySelector('.picture').checkVisibility()")


def test_everything_is_done_by_keys_alone(page, colours):
    page.key("Tab")
    assert page.focused() == "Skip to the pictures"
    page.key("Tab")
    assert page.focused() == "prompt"
    page.send("Input.insertText", text="a frog by keys")
    reached = []
    while page.focused() != "draw":
        page.key("Tab")
        reached.append(
            page.value("document.activeElement.id || document.activeElement.name || document.activeElement.tagName")
        )
        if reached[-1] == "quality":
            page.key("ArrowRight")
        assert len(reached) < 20
    assert reached == [
        "model",
        "shape",
        "width",
        "height",
        "quality",
        "steps-slide",
        "steps",
        "seed",
        "SUMMARY",
        "draw",
    ]
    outline = page.value("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.key("Enter")
    page.until(DONE)
    assert colours.drawn[0][1].quality == "high"
    page.until("!document.querySelector('progress')")
    reached = []
    while "Compare with exact" not in reached:
        page.key("Tab")
        reached.append(page.value("document.activeElement.ariaLabel || document.activeElement.textContent"))
        assert len(reached) < 10
    assert reached == ["Enlarge", "Remove", "Use seed", "Compare with exact"]
    page.key("Enter")
    page.until("document.querySelector('.note').textContent")
    page.key("Home")
    assert page.value(SHARE) == "0%"


def test_everything_has_a_name(page, colours):
    """In the tree that screen readers read, with all sorts of things on the page."""
    page.value("document.getElementById('more').open = true")
    colours.go.set()
    page.draw("a held frog", seed=1)
    page.until(DONE)
    page.press("Compare with high")
    page.until("document.querySelector('.note').textContent")
    colours.go.clear()
    page.draw("another held frog")
    page.until("document.querySelector('progress')?.value === 2")
    found: dict[str, list[str]] = {}
    for node in page.send("Accessibility.getFullAXTree")["nodes"]:
        if not node["ignored"]:
            found.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("button", "textbox", "spinbutton", "slider", "combobox", "radio", "image", "link", "progressbar"):
        assert found[role], role
        assert all(found[role]), (role, found[role])
    assert found["progressbar"] == ["Steps of: another held frog"]
    assert {"How much of exact is shown, beside high", "Steps, as a slider"} <= set(found["slider"])
    assert {"Exact: a held frog", "High: a held frog", "Preview of: another held frog"} == set(found["image"])
    assert page.value("document.documentElement.lang") == "en"


@pytest.mark.parametrize("width", [320, PHONE, 768])
def test_a_phone_has_all_of_it(page, address, width):
    page.open(address, width=width)
    page.until(FILLED)
    page.value("document.getElementById('more').open = true")
    page.draw("a" + "rather" * 40 + "longfrog", n=2, seed=2**53 - 1)
    page.until(f"{DONE} === 2")
    page.press("Compare with balanced")
    page.until("document.querySelector('.note').textContent")
    assert page.value("document.documentElement.scrollWidth") <= width
    wide = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.sr, .skip')
        && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
    assert page.value(wide) == []
    small = """[...document.querySelectorAll('button, .button, input:not(:disabled), select, textarea, summary')]
        .filter(e => e.checkVisibility()).map(e => [e.outerHTML.slice(0, 80), e.getBoundingClientRect()])
        .filter(([, r]) => r.width < 40 || r.height < 40).map(([html]) => html)"""
    if width < 600:
        assert page.value(small) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_readable(page, address, dark):
    """WCAG AA: the contrast of text with what it stands on is at least 4.5, and of edges 3."""
    page.open(address, dark=dark)
    page.until(FILLED)
    paper = page.value("getComputedStyle(document.body).backgroundColor")
    assert luminance(paper) < 0.1 if dark else luminance(paper) > 0.9
    page.draw("a frog")
    page.until(DONE)
    page.draw("a broken frog")
    page.until("document.getElementById('said').textContent && document.querySelector('.note').textContent")
    page.until("!!document.querySelector('#status b')")
    texts = (
        "h1", "h1 span", "#status li", "#status b", "label", "#prompt", ".hint", ".choices input + span", ".said.bad",
        ".choices input:checked + span", "#draw", ".keys kbd", ".prompt", ".facts", ".note", ".actions button",
        "footer",
    )  # fmt: skip
    for selector in texts:
        assert contrast(page, selector, "color") >= 4.5, selector
    for selector in ("#prompt", "#model", ".actions button"):
        assert contrast(page, selector, "borderTopColor", "parentElement") >= 3, selector


def contrast(page, selector: str, of: str, under: str = "") -> float:
    colours = page.value(f"""(() => {{
        const e = document.querySelector('{selector}');
        let under = e{"." + under if under else ""};
        while (getComputedStyle(under).backgroundColor === 'rgba(0, 0, 0, 0)') under = under.parentElement;
        return [getComputedStyle(e).{of}, getComputedStyle(under).backgroundColor]; }})()""")
    lighter, darker = sorted((luminance(colour) for colour in colours), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_nothing_moves_for_those_who_asked_for_that(page, address):
    for moves, found in ((True, "sheen"), (False, "none")):
        page.open(address, moves=moves)
        page.until(FILLED)
        page.draw("a held frog")
        page.until("!!document.querySelector('progress')")
        assert page.value("getComputedStyle(document.querySelector('.stage'), '::before').animationName") == found


def test_nothing_leaves_the_server_and_the_console_is_empty(page, address):
    page.draw("<img src=x onerror=alert(1)> & <b>", n=2)
    page.until(f"{DONE} === 2")
    assert page.text(".prompt") == "<img src=x onerror=alert(1)> & <b>", "what was typed is text"
    page.press("Compare with high")
    page.until("document.querySelector('.note').textContent")
    page.press("Enlarge")
    page.key("Escape")
    assert page.complaints() == []
    assert {url.split("/")[2] for url in page.requests() if url.startswith("http")} == {address.split("/")[2]}
    assert all(url.startswith((f"{address}/", "data:image/webp", "blob:")) for url in page.requests())
    # A page that complains is noticed: a script that the policy refuses.
    page.value("document.body.append(Object.assign(document.createElement('script'), {textContent: 'x = 1'}))")
    page.until("true")
    assert any("Content Security Policy" in complaint for complaint in page.complaints())
